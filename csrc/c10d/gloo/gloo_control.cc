#include "c10d/gloo/gloo_control.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/interruption.h"
#include "base/log.h"
#include "health/doorbell.h"
#include "health/text_field.h"
#include "topology/hosts.h"
#include "topology/rounds.h"

namespace pydist {
namespace {

// How often it is looked whether a connection stands, and how long a sleeper sleeps at most.
constexpr std::chrono::milliseconds kControlLook{1};
constexpr std::chrono::milliseconds kLongestControlSleep{50};
// More rounds than any all-gather has.
constexpr std::uint64_t kRounds = 64;

}  // namespace

GlooNode::GlooNode(NetworkSettings settings, const Place& place)
    : tcp_(
          [&] {
            settings.sockets = 1;
            settings.address = place.address;
            if (settings.interfaces.empty()) {
              settings.interfaces = place.interfaces;
            }
            return settings;
          }(),
          log_) {}

std::shared_ptr<GlooNode> GlooNode::of_process(const NetworkSettings& settings,
                                               const Place& place) {
  static std::mutex mutex;
  static std::weak_ptr<GlooNode> last;
  static Birth birth;
  const std::lock_guard lock(mutex);
  std::shared_ptr<GlooNode> node = birth.is_inherited() ? nullptr : last.lock();
  if (!node) {
    node = std::make_shared<GlooNode>(settings, place);
    last = node;
    birth = Birth();
  }
  return node;
}

GlooControl::GlooControl(Environment environment, std::shared_ptr<GlooNode> node)
    : environment_(std::move(environment)), node_(std::move(node)) {}

GlooControl::~GlooControl() {
  if (id_ != 0 && !birth_.is_inherited()) {
    node_->tcp().remove_sink(id_);
    node_->tcp().no_longer_expect(token_);
  }
}

GlooControl::Card GlooControl::card(std::uint64_t machine) const {
  Card card;
  card.machine = machine;
  write_text(card.address, node_->tcp().card().to_text());
  for (const int processor : allowed_processors()) {
    const auto place = static_cast<std::size_t>(processor);
    if (place / 64 < card.processors.size()) {
      card.processors[place / 64] |= std::uint64_t{1} << place % 64;
    }
  }
  card.quota = processor_quota().value_or(0);
  write_text(card.token, random_token());
  if (!environment_.job_secret) {
    write_text(card.secret, JobSecret::random().key());
  }
  return card;
}

JobSecret GlooControl::secret_of(const Card& first) const {
  const std::string told = read_text(first.secret);
  if (told.empty() && !environment_.job_secret) {
    throw TransportError("Rank 0 has PYDIST_JOB_SECRET, and this rank has not.");
  }
  return (told.empty() ? JobSecret(*environment_.job_secret) : JobSecret(told)).derive(token_);
}

std::chrono::nanoseconds GlooControl::spin_time(std::span<const Card> cards) const {
  std::vector<ProcessorGrant> grants;
  for (const Card& each : cards) {
    if (each.machine != cards[static_cast<std::size_t>(rank_)].machine) {
      continue;
    }
    ProcessorGrant& grant = grants.emplace_back();
    for (std::size_t processor = 0; processor < each.processors.size() * 64; ++processor) {
      if ((each.processors[processor / 64] >> processor % 64 & 1) != 0) {
        grant.processors.push_back(static_cast<int>(processor));
      }
    }
    if (each.quota != 0) {
      grant.quota = each.quota;
    }
  }
  return environment_.spin_time(has_core_for_every_rank(grants));
}

void GlooControl::connect(int rank, std::span<const Card> cards, Deadline deadline) {
  PYDIST_CHECK(id_ == 0);
  const int size = static_cast<int>(cards.size());
  rank_ = rank;
  spin_ = spin_time(cards);
  links_.resize(cards.size());
  is_gone_.resize(cards.size());
  for (std::size_t other = 0; other < cards.size(); ++other) {
    if (cards[other].address[0] == '\0') {
      throw TransportError(join("rank ", other, " has no such connections."));
    }
  }
  token_ = read_text(cards[0].token);
  const JobSecret secret = secret_of(cards[0]);
  id_ = number_of_token(token_);
  node_->tcp().expect(token_, secret);
  const Rounds rounds(rank, size);
  for (int round = 0; round < rounds.count(); ++round) {
    for (const int peer : {rounds.from(round), rounds.to(round)}) {
      LinkPtr& link = links_[static_cast<std::size_t>(peer)];
      if (link) {
        continue;
      }
      const std::string address = read_text(cards[static_cast<std::size_t>(peer)].address);
      link = node_->tcp().link_to(NodeCard::from_text(address), token_, secret,
                                  [](const std::string& /*why*/) {});
      // One end is enough.
      if (node_->tcp().card().name < link->peer()) {
        node_->tcp().connect(*link, deadline);
      }
    }
  }
  // From now on the thread that serves the network reads what is above.
  node_->tcp().add_sink(id_, *this);
  for (int peer = 0; peer < size; ++peer) {
    const LinkPtr& link = links_[static_cast<std::size_t>(peer)];
    while (link && !link->is_up()) {
      if (link->is_lost() || deadline.has_passed()) {
        throw TransportError(join("rank ", peer, " can't be connected with rank ", rank_, ": ",
                                  node_->tcp().hindrance(*link)));
      }
      std::this_thread::sleep_for(kControlLook);
    }
  }
}

void GlooControl::all_gather(const void* mine, void* all, std::size_t bytes, Deadline deadline,
                             const std::function<void()>& look) {
  PYDIST_CHECK(bytes <= kMostRecordBytes);
  const Rounds rounds(rank_, size());
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    check_hope(rank_);
    number = ++gathers_ * kRounds;
  }
  // The records of this rank and of those after it, as Rounds counts.
  std::vector<std::byte> records(links_.size() * bytes);
  std::memcpy(records.data(), mine, bytes);
  for (int round = 0; round < rounds.count(); ++round, ++number) {
    const std::size_t told = static_cast<std::size_t>(rounds.told(round)) * bytes;
    FrameHeader header = frame_between(FrameKind::kRecords, id_, rank_, rounds.to(round));
    header.number = number;
    links_[static_cast<std::size_t>(rounds.to(round))]->send(header, {records.data(), told});
    const std::vector<std::byte> got = await(rounds.from(round), number, deadline, look);
    if (got.size() != told) {
      throw TransportError(join("rank ", rounds.from(round), " has sent ", got.size(),
                                " bytes of records instead of ", told, "."));
    }
    std::memcpy(records.data() + (std::size_t{1} << round) * bytes, got.data(), got.size());
  }
  for (int places = 0; places < rounds.size(); ++places) {
    std::memcpy(
        static_cast<std::byte*>(all) + static_cast<std::size_t>(rounds.after(places)) * bytes,
        records.data() + static_cast<std::size_t>(places) * bytes, bytes);
  }
}

std::vector<std::byte> GlooControl::await(int sender, std::uint64_t number, Deadline deadline,
                                          const std::function<void()>& look) {
  const Deadline spin_end = Deadline::in(spin_);
  Deadline next_look = Deadline::in(kInterruptionInterval);
  bool spins = spin_.count() != 0;
  std::unique_lock lock(mutex_);
  while (true) {
    if (const auto it = arrived_.find({sender, number}); it != arrived_.end()) {
      std::vector<std::byte> got = std::move(it->second);
      arrived_.erase(it);
      lock.unlock();
      node_->tcp().end_polling();
      return got;
    }
    check_hope(sender);
    if (deadline.has_passed()) {
      throw Timeout(join("gloo: timed out waiting for what rank ", sender, " has called."));
    }
    if (spins) {
      lock.unlock();
      for (int turn = 0; turn < 32 && !node_->tcp().poll(/*stays=*/true); ++turn) {
        spin_pause();
      }
      if (spin_end.has_passed()) {
        spins = false;
        node_->tcp().hand_over();
      }
      lock.lock();
      continue;
    }
    changed_.wait_until(lock, deadline.earlier_of(Deadline::in(kLongestControlSleep)).when());
    if (look && next_look.has_passed()) {
      lock.unlock();
      look();
      require_not_forked();
      lock.lock();
      next_look = Deadline::in(kInterruptionInterval);
    }
  }
}

void GlooControl::check_hope(int sender) const {
  if (is_closed_) {
    throw Aborted("The connections of the group have been closed.");
  }
  if (closed_by_ >= 0 || is_gone_[static_cast<std::size_t>(sender)]) {
    throw PeerLost(
        join("gloo: the connection was closed by rank ", closed_by_ >= 0 ? closed_by_ : sender));
  }
}

std::byte* GlooControl::place(const FrameHeader& header, std::uint64_t sender) {
  const bool is_rank = header.sender >= 0 && header.sender < size() && header.receiver == rank_;
  const LinkPtr link = is_rank ? links_[static_cast<std::size_t>(header.sender)] : nullptr;
  bool makes_sense = link && link->number() == sender;
  if (header.kind == FrameKind::kRecords) {
    // A rank is one all-gather ahead at most: it has needed what this one has said in the last.
    const std::lock_guard lock(mutex_);
    const std::uint64_t gather = header.number / kRounds;
    makes_sense = makes_sense && gather >= std::max<std::uint64_t>(gathers_, 1) &&
                  gather <= gathers_ + 1 && header.bytes <= links_.size() * kMostRecordBytes &&
                  !arrived_.contains({header.sender, header.number});
  } else {
    makes_sense = makes_sense && header.kind == FrameKind::kClosed && header.bytes == 0;
  }
  if (!makes_sense) {
    throw BadFrame(join("a frame of kind ", static_cast<int>(header.kind), " from rank ",
                        header.sender, " to rank ", header.receiver, " with number ", header.number,
                        " and ", header.bytes, " bytes."));
  }
  return nullptr;
}

void GlooControl::take(const FrameHeader& header, const std::byte* payload,
                       std::uint64_t /*sender*/) {
  const std::lock_guard lock(mutex_);
  if (header.kind == FrameKind::kRecords) {
    arrived_.emplace(std::pair(header.sender, header.number),
                     std::vector<std::byte>(payload, payload + header.bytes));
  } else {
    closed_by_ = header.sender;
  }
  changed_.notify_all();
}

void GlooControl::lose(std::uint64_t sender) {
  const std::lock_guard lock(mutex_);
  for (std::size_t rank = 0; rank < links_.size(); ++rank) {
    if (links_[rank] && links_[rank]->number() == sender) {
      is_gone_[rank] = true;
    }
  }
  changed_.notify_all();
}

void GlooControl::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_closed_, true)) {
      return;
    }
    changed_.notify_all();
  }
  log_errors_of([this] {
    for (int peer = 0; peer < size(); ++peer) {
      const LinkPtr& link = links_[static_cast<std::size_t>(peer)];
      if (link && link->is_up()) {
        link->send(frame_between(FrameKind::kClosed, id_, rank_, peer));
      }
    }
  });
}

}  // namespace pydist
