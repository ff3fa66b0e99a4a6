// What comes over the network is damaged: whatever a connection brings, before or after both ends
// have proved who they are, it costs at most the rank that it is from. Another group of the same
// process goes on at work meanwhile.
//
// PYDIST_TEST_FUZZ sets how many frames are sent.

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "communicator/native/native_communicator.h"
#include "communicator/peers/remote_rank.h"
#include "memory_store.h"
#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

int frames_to_send() {
  const char* const asked = std::getenv("PYDIST_TEST_FUZZ");
  return asked != nullptr ? std::atoi(asked) : 3'000;
}

// So many processes one endpoint meets: it keeps what it knows of each.
constexpr int kAttacksOfAnEndpoint = 300;

// Frames as a rank sends them, from the remote rank to rank 0.
std::vector<std::string> recorded_frames() {
  RemoteGround ground;
  RemoteRanks& remote = ground.remote();
  for (std::uint64_t number = 1; number <= 3; ++number) {
    Post& post = ground.segment().control(0).posts[number % kPostDepth];
    post.kind = OpKind::kAllReduce;
    post.flags =
        number == 2 ? std::uint8_t{Post::kRagged} : static_cast<std::uint8_t>(Offer::kEager);
    post.count = 1'000;
    ground.segment().control(0).details[number % kPostDepth].eager_bytes = 100 * number;
    remote.send_post(number, number);
    remote.send_deposit(kRemote, number, std::vector<std::byte>(50 * number));
  }
  const std::unique_ptr<SendChannel> channel = remote.make_sender(kRemote);
  const std::unique_ptr<ReceiveChannel> received = remote.make_receiver(kRemote);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5'000}, std::size_t{40'000}}) {
    channel->send(bytes);
    remote.to(kRemote).send(bytes);
    received->release();
    remote.from(kRemote).release();
  }
  for (std::uint64_t number = 0; number < 3; ++number) {
    Announcement announcement{};
    announcement.tag = 7;
    announcement.count = number;
    remote.send_announcement(kRemote, number, std::as_bytes(std::span(&announcement, 1)));
    remote.send_heard(kRemote, number + 1);
    remote.send_grant(kRemote, number, number);
  }
  remote.refresh_pages();
  FrameHeader request = ground.header(FrameKind::kPageRequest);
  ground.send(request);
  const std::optional<std::string> page = ground.receive(FrameKind::kPage);
  EXPECT_TRUE(page);

  RemoteGround again;  // what it has sent before the page has been read
  again.remote().send_failure({ErrorKind::kMismatch, "the shapes differ", Blame{.ranks = {2}}});
  again.remote().send_departure();
  std::vector<std::string> frames{*page};
  for (RemoteGround* const each : {&ground, &again}) {
    each->endpoint().network()->stop();
    while (true) {
      std::string text = receive_all(each->connection(), sizeof(FrameHeader));
      if (text.size() < sizeof(FrameHeader)) {
        break;
      }
      FrameHeader header;
      std::memcpy(&header, text.data(), sizeof header);
      frames.push_back(text + receive_all(each->connection(), header.bytes));
    }
  }
  for (std::string& frame : frames) {
    FrameHeader header;
    std::memcpy(&header, frame.data(), sizeof header);
    header.sender = kRemote;
    header.receiver = 0;
    std::memcpy(frame.data(), &header, sizeof header);
  }
  return frames;
}

class Mutator {
 public:
  explicit Mutator(std::vector<std::string> frames) : frames_(std::move(frames)) {}

  [[nodiscard]] std::size_t below(std::size_t end) { return random_() % end; }

  // A few frames, of which most are as they should be, and how many they are.
  std::string stream(int& count) {
    std::vector<std::string> some;
    const std::size_t length = 1 + below(8);
    const std::size_t first = below(frames_.size());
    for (std::size_t i = 0; i < length; ++i) {
      const bool is_in_order = below(3) != 0;
      some.push_back(frames_[is_in_order ? (first + i) % frames_.size() : below(frames_.size())]);
    }
    switch (below(6)) {
      case 0:
        std::shuffle(some.begin(), some.end(), random_);
        break;
      case 1:
        some.push_back(some[below(some.size())]);
        break;
      default:
        change_header(some[below(some.size())]);
        break;
    }
    std::string all;
    for (const std::string& frame : some) {
      all += frame;
    }
    damage(all);
    count += static_cast<int>(some.size());
    return all;
  }

  void damage(std::string& bytes) {
    if (bytes.empty()) {
      bytes = "x";
    }
    switch (below(8)) {
      case 0:
        for (std::size_t times = 1 + below(8); times != 0; --times) {
          bytes[below(bytes.size())] ^= static_cast<char>(1u << below(8));
        }
        break;
      case 1:
        bytes.resize(below(bytes.size()) + 1);
        break;
      case 2:
        bytes.insert(below(bytes.size()),
                     std::string(1 + below(50), static_cast<char>(below(256))));
        break;
      case 3:
        bytes.erase(below(bytes.size()), 1 + below(50));
        break;
      case 4:
        for (std::size_t at = below(bytes.size()); at < bytes.size(); ++at) {
          bytes[at] = static_cast<char>(below(256));
        }
        break;
      default:
        break;
    }
  }

 private:
  // One field near what there was, at the ends of what there may be, or anything.
  void change_header(std::string& frame) {
    FrameHeader header;
    std::memcpy(&header, frame.data(), sizeof header);
    const auto other = [this](auto value) {
      using Value = decltype(value);
      const std::uint64_t words[] = {static_cast<std::uint64_t>(value) + 1,
                                     static_cast<std::uint64_t>(value) - 1,
                                     0,
                                     ~std::uint64_t{0},
                                     std::uint64_t{1} << below(64),
                                     below(10),
                                     random_()};
      return static_cast<Value>(words[below(std::size(words))]);
    };
    switch (below(9)) {
      case 0:
        header.kind = static_cast<FrameKind>(below(static_cast<std::size_t>(FrameKind::kLast) + 2));
        break;
      case 1:
        header.lanes = other(header.lanes);
        break;
      case 2:
        header.bytes = other(header.bytes);
        break;
      case 3:
        header.bytes = static_cast<std::uint32_t>(below(70'000));
        frame.resize(sizeof header + header.bytes, 'x');
        break;
      case 4:
        header.sender = other(header.sender);
        break;
      case 5:
        header.receiver = other(header.receiver);
        break;
      case 6:
        header.extra = other(header.extra);
        break;
      case 7:
        header.group = below(4) == 0 ? 0 : header.group;
        break;
      default:
        header.number = other(header.number);
        break;
    }
    std::memcpy(frame.data(), &header, sizeof header);
  }

  std::vector<std::string> frames_;
  std::mt19937_64 random_{7};
};

// Two ranks on two hosts, of which one shares its process with the ranks that are attacked.
class HonestGroup {
 public:
  explicit HonestGroup(const std::shared_ptr<Endpoint>& endpoint) {
    other_ = std::thread([this] {
      Environment environment = test_environment();
      environment.host_id = "host c";
      const auto own = std::make_shared<Endpoint>(environment);
      const CommunicatorPtr communicator = join(1, own, environment);
      for (int sum = 0; sum >= 0;) {
        std::vector<int> values(2'000, 1);
        communicator->run(all_reduce(values));
        sum = values[1'999];
      }
    });
    Environment environment = test_environment();
    communicator_ = join(0, endpoint, environment);
  }
  ~HonestGroup() {
    work(-1'000);
    other_.join();
  }

  void work(int value = 5) {
    std::vector<int> values(2'000, value);
    communicator_->run(all_reduce(values));
    EXPECT_EQ(values, std::vector<int>(2'000, value + 1));
  }

 private:
  CommunicatorPtr join(int rank, const std::shared_ptr<Endpoint>& endpoint,
                       const Environment& environment) {
    NativeOptions options{"honest", environment};
    options.address = "127.0.0.1";
    options.secret = secret_;
    return create_native_communicator(store_, rank, 2, options, {endpoint});
  }

  const std::shared_ptr<const JobSecret> secret_ =
      std::make_shared<const JobSecret>(JobSecret::random());
  const std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  CommunicatorPtr communicator_;
  std::thread other_;
};

// A thread that drives operations may be the last to hold an endpoint, and closes it after its
// owner has let go of it.
void expect_descriptors(std::size_t count) {
  EXPECT_TRUE(eventually([&] { return descriptors_in_use() == count; }))
      << descriptors_in_use() << " instead of " << count;
}

// What whoever waits for the rank would look at.
void look_around(RemoteGround& ground, Mutator& dice) {
  static_cast<void>(ground.health().failure());
  static_cast<void>(ground.health().why_vain(static_cast<int>(dice.below(4)) - 1));
  static_cast<void>(ground.health().absence());
  EXPECT_LT(ground.health().where(kRemote, OpKind::kAllReduce, 1).size(), 10'000u);
  static_cast<void>(ground.health().keeper_behind(kRemote));
  static_cast<void>(ground.remote().is_gone(kRemote));
  ReceiveChannel& channel = ground.remote().from(kRemote);
  for (int slots = 0; slots < 8 && channel.until_received().holds(); ++slots) {
    const std::span<const std::byte> slot = channel.slot();
    EXPECT_LE(slot.size(), ground.collectives().channel(kRemote, 0).slot_bytes);
    static_cast<void>(std::count(slot.begin(), slot.end(), std::byte{'x'}));
    channel.release();
  }
}

TEST(NativeWireTest, GarbageAfterAHandshakeCostsItsSenderAlone) {
  Mutator dice(recorded_frames());
  const std::size_t before = descriptors_in_use();
  const int wanted = frames_to_send();
  int sent = 0;
  int survived = 0;
  while (sent < wanted) {
    RemoteGround ground;
    HonestGroup honest(ground.shared_endpoint());
    for (int attack = 0; attack < kAttacksOfAnEndpoint && sent < wanted; ++attack) {
      if (attack != 0) {
        ground.renew();
      }
      const std::string memory = ground.memory_of_this_host();
      FileDescriptor second;
      if (dice.below(4) == 0) {
        second = ground.connect_again();
      }
      for (std::size_t streams = 1 + dice.below(3); streams != 0; --streams) {
        const int socket = second && dice.below(2) == 0 ? second.get() : ground.connection();
        send_some(socket, dice.stream(sent));
        look_around(ground, dice);
      }
      ::shutdown(ground.connection(), SHUT_WR);
      second = FileDescriptor();
      ASSERT_TRUE(eventually([&] { return ground.far().is_dead.load(); }));
      look_around(ground, dice);
      survived += ground.far().loss.empty() ? 1 : 0;
      ASSERT_EQ(ground.memory_of_this_host(), memory);
      if (attack % 20 == 0) {
        honest.work();
      }
    }
  }
  // Some of what was sent was no garbage at all.
  EXPECT_GT(survived, 0);
  expect_descriptors(before);
}

TEST(NativeWireTest, GarbageInsteadOfAHandshakeAgreesOnNothing) {
  const std::size_t before = descriptors_in_use();
  {
    Mutator dice({});
    RemoteGround ground;
    HonestGroup honest(ground.shared_endpoint());
    const NodeCard& card = ground.endpoint().network()->card();
    const SocketAddress address = SocketAddress::from_text(card.addresses[0]);
    const JobSecret secret = JobSecret::random();
    const std::string token = random_token();
    ground.endpoint().network()->expect(token, secret);
    const std::string name = random_token();
    const LinkPtr link = ground.endpoint().network()->link_to(
        {name, "", {"127.0.0.1 port 9"}}, token, secret, [](const std::string&) {});
    const int wanted = frames_to_send() / 4;
    for (int i = 0; i < wanted; ++i) {
      const FileDescriptor stranger = connect_raw(address);
      const DialerHandshake handshake({token, name, card.name}, secret);
      const std::string right = handshake.hello();
      std::string hello = right;
      dice.damage(hello);
      send_some(stranger.get(), hello);
      if (hello == right) {
        std::string challenge = receive_all(stranger.get(), kChallengeBytes);
        // The oldest stranger may have been dropped for the latest.
        if (challenge.size() == kChallengeBytes) {
          const std::string answer = *handshake.answer(challenge);
          std::string damaged = answer;
          while (damaged.substr(0, answer.size()) == answer) {
            dice.damage(damaged);
          }
          send_some(stranger.get(), damaged);
        }
      }
      ASSERT_FALSE(link->is_up()) << i;
      if (i % 200 == 0) {
        honest.work();
        EXPECT_FALSE(ground.far().is_dead.load());
      }
    }
    EXPECT_TRUE(connect_as({token, name, card.name}, secret, address));
    EXPECT_TRUE(eventually([&] { return link->is_up() || link->is_lost(); }));
  }
  expect_descriptors(before);
}

}  // namespace
}  // namespace pydist::testing
