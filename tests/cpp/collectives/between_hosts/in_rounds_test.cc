// Ranks on hosts that tell each other in rounds, driven by one thread in orders drawn at random:
// each host has memory of its own, and what is sent between two ranks arrives in order, when chance
// will have it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collectives/any_order.h"
#include "collectives/between_hosts/between_hosts.h"
#include "communicator/peers/post_records.h"
#include "memory/symmetric_heap.h"

namespace pydist {
namespace {

constexpr std::size_t kTransitBytes = 4096;
constexpr RoundsSettings kNever{.from_hosts = 1 << 20, .most_bytes = 0};
constexpr RoundsSettings kAlways{.from_hosts = 2, .most_bytes = std::size_t{1} << 20};

std::size_t place_of(int number) { return static_cast<std::size_t>(number); }

// What one call of the system sends to a rank.
struct Delivery {
  int receiver = 0;
  int depositor = -1;  // the sender, where there is a deposit
  std::uint64_t round = 0;
  std::vector<std::byte> deposit{};
  std::vector<std::pair<int, std::vector<std::byte>>> eager{};  // by rank
  std::uint64_t sequence = 0;
  std::vector<std::byte> posts{};
};

class Mail {
 public:
  Mail(const Placement& placement, std::vector<GroupSegment> segments)
      : placement_(placement), segments_(std::move(segments)) {}

  [[nodiscard]] const GroupSegment& segment_of(int rank) const {
    return segments_[place_of(placement_.host_of(rank))];
  }
  void send(int sender, Delivery delivery) {
    ++sent_;
    if (sender == cuts_ && !delivery.deposit.empty()) {
      delivery.deposit.pop_back();
    }
    roads_[{sender, delivery.receiver}].push_back(std::move(delivery));
  }
  [[nodiscard]] std::size_t sent() const { return sent_; }
  void cut_deposits_of(int rank) { cuts_ = rank; }

  bool bring_one(std::mt19937& random) {
    std::vector<std::deque<Delivery>*> busy;
    for (auto& [ends, road] : roads_) {
      if (!road.empty()) {
        busy.push_back(&road);
      }
    }
    if (busy.empty()) {
      return false;
    }
    std::deque<Delivery>& road = *busy[random() % busy.size()];
    const Delivery delivery = std::move(road.front());
    road.pop_front();
    const GroupSegment& segment = segment_of(delivery.receiver);
    const auto put = [&](int rank, const std::vector<std::byte>& data) {
      segment.reserve_transit(rank);
      std::copy(data.begin(), data.end(), segment.transit(rank, delivery.round));
      segment.control(rank).arrivals[delivery.round % kTransitSlots] = {delivery.round,
                                                                        data.size()};
    };
    if (delivery.depositor >= 0) {
      put(delivery.depositor, delivery.deposit);
      segment.control(delivery.depositor).deposited.store(delivery.round + 1);
    }
    for (const auto& [rank, data] : delivery.eager) {
      put(rank, data);
    }
    for (std::span<const std::byte> records(delivery.posts); !records.empty();) {
      const PostRecord record = take_record(records, place_of(placement_.size()));
      const Counter& last =
          segment.control(record.rank).posts[delivery.sequence % kPostDepth].sequence;
      EXPECT_LT(last.load(), delivery.sequence) << "rank " << record.rank << " was told of twice";
      EXPECT_NE(placement_.host_of(record.rank), placement_.host_of(delivery.receiver));
      write_post(record, segment, delivery.sequence);
    }
    return true;
  }

 private:
  const Placement& placement_;
  const std::vector<GroupSegment> segments_;  // by host
  std::map<std::pair<int, int>, std::deque<Delivery>> roads_;
  std::size_t sent_ = 0;
  int cuts_ = -1;
};

class MailingRank final : public Announcer {
 public:
  MailingRank(int rank, const Placement& placement, Mail& mail)
      : rank_(rank), placement_(placement), mail_(mail) {}

  void send_post(std::uint64_t sequence, std::uint64_t round) override {
    for (int host = 0; host < placement_.hosts(); ++host) {
      if (host != placement_.host_of(rank_)) {
        send_posts({&rank_, 1}, placement_.counterpart(rank_, host), sequence, round, {});
      }
    }
  }
  void send_posts(std::span<const int> ranks, int receiver, std::uint64_t sequence,
                  std::uint64_t round, std::span<const std::byte> deposit) override {
    Delivery delivery{.receiver = receiver, .round = round, .sequence = sequence};
    if (!deposit.empty()) {
      delivery.depositor = rank_;
      delivery.deposit.assign(deposit.begin(), deposit.end());
    }
    const GroupSegment& segment = mail_.segment_of(rank_);
    const std::size_t slot = sequence % kPostDepth;
    for (const int rank : ranks) {
      EXPECT_EQ(segment.control(rank).posts[slot].sequence.load(), sequence);
      append_post(delivery.posts, segment, rank, slot, place_of(placement_.size()));
      if (const std::uint64_t bytes = segment.control(rank).details[slot].eager_bytes; bytes != 0) {
        const std::byte* const data = segment.transit(rank, round);
        delivery.eager.emplace_back(rank, std::vector<std::byte>(data, data + bytes));
      }
    }
    mail_.send(rank_, std::move(delivery));
  }
  void send_deposit(int receiver, std::uint64_t round, std::span<const std::byte> data) override {
    Delivery delivery{.receiver = receiver, .depositor = rank_, .round = round};
    delivery.deposit.assign(data.begin(), data.end());
    mail_.send(rank_, std::move(delivery));
  }

 private:
  const int rank_;
  const Placement& placement_;
  Mail& mail_;
};

class NoChannels final : public Channels {
 public:
  [[nodiscard]] std::size_t slot_bytes() const noexcept override { return 0; }
  [[nodiscard]] std::size_t slot_bytes_on_host() const noexcept override { return 0; }
  [[nodiscard]] std::size_t window() const noexcept override { return 0; }
  [[nodiscard]] SendChannel& to(int /*rank*/) override { throw InvalidUsage("no channels"); }
  [[nodiscard]] ReceiveChannel& from(int /*rank*/) override { throw InvalidUsage("no channels"); }
};

Placement placement_on(const std::vector<int>& hosts) {
  std::vector<std::string> identities;
  for (const int host : hosts) {
    identities.push_back(std::to_string(host));
  }
  return Placement(identities);
}

std::vector<GroupSegment> segments_for(const Placement& placement) {
  const int size = placement.size();
  std::vector<GroupSegment> segments;
  for (int host = 0; host < placement.hosts(); ++host) {
    segments.emplace_back(SharedSegment::create("rounds", GroupSegment::bytes(size, kTransitBytes)),
                          size, kTransitBytes);
    for (int rank = 0; rank < size; ++rank) {
      segments.back().reserve_control(rank);
    }
  }
  return segments;
}

// An all_reduce of whole numbers, whose sums are exact in any order, or a barrier.
struct Step {
  std::size_t count = 0;
  bool is_in_place = false;
  DType wire = DType::kFloat32;
  bool is_barrier = false;
};

class RanksInRounds {
 public:
  explicit RanksInRounds(const std::vector<int>& hosts)
      : placement_(placement_on(hosts)),
        mail_(placement_, segments_for(placement_)),
        bells_(hosts.size()) {
    std::vector<Doorbell*> bells;
    for (Doorbell& bell : bells_) {
      bells.push_back(&bell);
    }
    for (int rank = 0; rank < size(); ++rank) {
      heaps_.push_back(std::make_unique<SymmetricHeap>(rank, size(), SharedFile::create("heap"),
                                                       std::vector<std::string>(hosts.size())));
      announcers_.push_back(std::make_unique<MailingRank>(rank, placement_, mail_));
      groups_.push_back(std::make_unique<Group>(rank, size(), mail_.segment_of(rank), bells,
                                                *heaps_.back(), announcers_.back().get()));
    }
  }

  [[nodiscard]] int size() const { return placement_.size(); }
  [[nodiscard]] Mail& mail() { return mail_; }

  // As what is never passed on, such as an allocation.
  void announce_directly(int rank) { direct_.insert(rank); }

  // Each rank runs its steps one after the other, as fast as it comes to. Returns false where all
  // wait.
  [[nodiscard]] bool run(const std::vector<std::vector<Step>>& steps_of_ranks,
                         const RoundsSettings& settings, std::mt19937& random) {
    std::vector<std::unique_ptr<Execution>> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      ranks.push_back(std::make_unique<Execution>(run_steps(
          rank, steps_of_ranks[place_of(rank)], direct_.contains(rank) ? kNever : settings)));
    }
    return end_in_any_order(ranks, random,
                            [this](std::mt19937& chance) { return mail_.bring_one(chance); });
  }

 private:
  static float number(int rank, std::size_t index, std::size_t step) {
    return static_cast<float>((place_of(rank) * 5 + index * 3 + step) % 8);
  }

  Task run_steps(int rank, const std::vector<Step>& steps, RoundsSettings settings) {
    Group& group = *groups_[place_of(rank)];
    for (std::size_t step = 0; step < steps.size(); ++step) {
      const Step& what = steps[step];
      std::vector<float> input(what.count);
      std::vector<float> output(what.count, -1.0F);
      for (std::size_t index = 0; index < what.count; ++index) {
        input[index] = number(rank, index, step);
      }
      std::vector<float>& result = what.is_in_place ? input : output;
      std::vector<Buffer> inputs{{input.data(), what.count, DType::kFloat32}};
      std::vector<Buffer> outputs{{result.data(), what.count, DType::kFloat32}};
      if (what.is_barrier) {
        inputs.clear();
        outputs.clear();
      }
      group.begin();
      co_await run_between_hosts(
          group,
          Call{what.is_barrier ? OpKind::kBarrier : OpKind::kAllReduce, DType::kFloat32, what.wire,
               ReduceOp::kSum, 0, 1.0, Blocks(inputs, 1), Blocks(outputs, 1), what.count},
          channels_, placement_, settings);
      for (std::size_t index = 0; index < what.count; ++index) {
        float sum = 0.0F;
        for (int other = 0; other < size(); ++other) {
          sum += number(other, index, step);
        }
        if (result[index] != sum) {
          ADD_FAILURE() << "rank " << rank << " of " << size() << ", step " << step << ", "
                        << what.count << " elements: [" << index << "] is " << result[index]
                        << " instead of " << sum;
          break;
        }
      }
    }
  }

  const Placement placement_;
  std::set<int> direct_;
  Mail mail_;
  std::vector<Doorbell> bells_;
  NoChannels channels_;
  std::vector<std::unique_ptr<SymmetricHeap>> heaps_;
  std::vector<std::unique_ptr<MailingRank>> announcers_;
  std::vector<std::unique_ptr<Group>> groups_;
};

// All that may go between hosts of one rank each, without a channel.
std::vector<Step> any_steps(int hosts, std::mt19937& random) {
  // What half of the slices take fills a transit slot.
  const std::size_t most =
      kTransitBytes / sizeof(float) / ((place_of(hosts) + 1) / 2) / 16 * 16 * place_of(hosts);
  std::vector<Step> steps;
  for (int step = 0; step < 20; ++step) {
    const std::size_t counts[] = {0, 1, 9, 10, 64, 65, 100, 300, 1000, most - 1, most};
    steps.push_back({.count = std::min(most, counts[random() % std::size(counts)]),
                     .is_in_place = random() % 2 == 0,
                     .wire = random() % 4 == 0 ? DType::kBFloat16 : DType::kFloat32,
                     .is_barrier = random() % 8 == 0});
    if (steps.back().is_barrier) {
      steps.back().count = 0;
      steps.back().wire = DType::kFloat32;
    }
  }
  return steps;
}

TEST(InRoundsTest, HostsOfOneRankComeToTheSum) {
  for (int hosts = 2; hosts <= 17; ++hosts) {
    std::vector<int> ranks;
    for (int host = 0; host < hosts; ++host) {
      ranks.push_back(host);
    }
    for (unsigned seed = 0; seed < 6; ++seed) {
      std::mt19937 random(seed);
      RanksInRounds all(ranks);
      const std::vector<std::vector<Step>> steps(place_of(hosts), any_steps(hosts, random));
      ASSERT_TRUE(all.run(steps, kAlways, random)) << hosts << " hosts, seed " << seed;
    }
  }
}

TEST(InRoundsTest, HostsOfAnyRanksHearOfEachOther) {
  const std::vector<std::vector<int>> placements = {
      {0, 0, 1, 1},          {0, 1, 1, 1},
      {0, 1, 0, 1, 2, 2},    {0, 0, 0, 1, 2, 2},
      {0, 1, 2, 2, 2, 2, 2}, {0, 1, 2, 3, 4, 0},
      {0, 1, 2, 3, 3, 2, 3}, {1, 0, 0, 0, 1, 2, 3, 3, 3, 2, 2, 0},
  };
  for (const std::vector<int>& hosts : placements) {
    for (unsigned seed = 0; seed < 10; ++seed) {
      std::mt19937 random(seed);
      RanksInRounds all(hosts);
      std::vector<Step> steps;
      for (int step = 0; step < 20; ++step) {
        // In the post, in its first line or in all, and ahead of it.
        const std::size_t counts[] = {0, 1, 10, 11, 64, 65, 500, 1000};
        steps.push_back(
            {.count = counts[random() % std::size(counts)], .is_in_place = random() % 2 == 0});
      }
      ASSERT_TRUE(all.run(std::vector(hosts.size(), steps), kAlways, random))
          << hosts.size() << " ranks, seed " << seed;
    }
  }
}

// log2(h) messages of each rank announce a collective, and as many more bring the results.
TEST(InRoundsTest, MessagesAreAsFewAsPromised) {
  constexpr int kHosts = 16;
  std::vector<int> ranks;
  for (int host = 0; host < kHosts; ++host) {
    ranks.push_back(host);
  }
  std::mt19937 random(1);
  const auto messages_of = [&](std::size_t count, const RoundsSettings& settings) {
    RanksInRounds all(ranks);
    EXPECT_TRUE(all.run(std::vector(kHosts, std::vector{Step{.count = count}}), settings, random));
    return all.mail().sent();
  };
  EXPECT_EQ(messages_of(2, kAlways), 16U * 4);
  EXPECT_EQ(messages_of(500, kAlways), 16U * 4);
  EXPECT_EQ(messages_of(1'500, kAlways), 16U * 8);
  EXPECT_EQ(messages_of(2, {.from_hosts = 17, .most_bytes = 0}), 16U * 15);
}

// One rank sends less than the others expect, as one whose memory is damaged may.
TEST(InRoundsTest, WhatIsTooShortIsNotSummed) {
  for (const std::vector<int>& hosts : {std::vector{0, 1, 2, 3, 4}, std::vector{0, 1, 2, 3}}) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      std::mt19937 random(seed);
      RanksInRounds all(hosts);
      all.mail().cut_deposits_of(2);
      const std::vector<std::vector<Step>> steps(hosts.size(), {Step{.count = 1'500}});
      try {
        static_cast<void>(all.run(steps, kAlways, random));
        ADD_FAILURE() << "seed " << seed;
      } catch (const Error& error) {
        EXPECT_EQ(error.blame().ranks, std::vector<int>{2}) << error.what();
      }
    }
  }
}

TEST(InRoundsTest, SettingsAreForTheNetworkUnlessTheUserSays) {
  const auto of = [](int hosts, bool is_one_machine, std::optional<std::size_t> from = {},
                     std::optional<std::size_t> bytes = {}) {
    Environment environment;
    environment.rounds_from = from;
    environment.rounds_bytes = bytes;
    const RoundsSettings settings = rounds_settings(environment, hosts, is_one_machine);
    return std::pair(settings.from_hosts, settings.most_bytes);
  };
  using Found = std::pair<std::size_t, std::size_t>;
  EXPECT_EQ(of(32, false), Found(32, 128 << 10));
  EXPECT_EQ(of(1'000, false), Found(32, 256 << 10));
  EXPECT_EQ(of(3, true), Found(3, 256 << 10));
  EXPECT_EQ(of(3, true, 5, 7), Found(5, 7));
}

// One rank calls something else, which may be announced directly where the others count on its
// passing on what they say.
TEST(InRoundsTest, ADifferentCallIsNamedAtOnce) {
  const std::vector<std::vector<int>> placements = {
      {0, 1},
      {0, 1, 2},
      {0, 1, 2, 3},
      {0, 1, 2, 3, 4},
      {0, 1, 2, 3, 4, 5, 6, 7},
      {0, 1, 2, 3, 4, 5, 6, 7, 8},
      {0, 0, 0, 1, 1, 2, 2},
      {0, 0, 1, 1, 2, 3, 3},
  };
  const Step small{.count = 3};
  const Step middle{.count = 1'500};
  const Step barrier{.is_barrier = true};
  for (const std::vector<int>& hosts : placements) {
    const bool has_one_each = std::set<int>(hosts.begin(), hosts.end()).size() == hosts.size();
    for (int other = 0; other < static_cast<int>(hosts.size()); ++other) {
      for (const auto& [usual, different] :
           {std::pair{small, barrier}, {barrier, small}, {small, middle}, {middle, small}}) {
        if (!has_one_each && (usual.count > 1'000 || different.count > 1'000)) {
          continue;  // goes by hosts
        }
        for (unsigned seed = 0; seed < 4; ++seed) {
          std::mt19937 random(seed);
          RanksInRounds all(hosts);
          std::vector<std::vector<Step>> steps(hosts.size(), {usual});
          steps[place_of(other)] = {different};
          if (seed % 2 == 0) {
            all.announce_directly(other);
          }
          EXPECT_THROW(static_cast<void>(all.run(steps, kAlways, random)), Mismatch)
              << hosts.size() << " ranks, rank " << other << ", seed " << seed;
        }
      }
    }
  }
}

// Who drives on each host announces directly, and the others count on it.
TEST(InRoundsTest, DriversThatDifferAreNamedAtOnce) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    RanksInRounds all({0, 1, 1, 2, 2});
    std::vector<std::vector<Step>> steps(5, {Step{.count = 3}});
    for (const int driver : {0, 1, 3}) {
      steps[place_of(driver)] = {Step{.is_barrier = true}};
      all.announce_directly(driver);
    }
    EXPECT_THROW(static_cast<void>(all.run(steps, kAlways, random)), Mismatch) << seed;
  }
}

}  // namespace
}  // namespace pydist
