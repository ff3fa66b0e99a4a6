// Segments that a rank of another host sends to where this one expects them.

#include "transport/tcp/segment_targets.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "communicator/departure.h"
#include "communicator/peers/remote_rank.h"
#include "communicator/peers/remote_ranks.h"
#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

FrameHeader collective_segment(const RemoteGround& ground, std::uint64_t number) {
  FrameHeader header = ground.header(FrameKind::kSegment, number);
  header.lanes = static_cast<std::uint8_t>(LaneSet::kCollectives);
  return header;
}

TEST(ExpectedSegmentsTest, ASegmentGoesToWhereItIsExpectedAndIsAsLong) {
  RemoteGround ground;
  ReceiveChannel& channel = ground.remote().from(kRemote);
  std::string first(5, '.');
  std::string third(6, '.');
  std::string fourth(5, '.');
  channel.expect(1, std::as_writable_bytes(std::span(first)));
  channel.expect(3, std::as_writable_bytes(std::span(third)));
  channel.expect(4, std::as_writable_bytes(std::span(fourth)));
  const std::vector<std::string> sent{"first", "2nd", "third", "forth"};
  for (std::uint64_t number = 1; number <= sent.size(); ++number) {
    ASSERT_TRUE(ground.send(collective_segment(ground, number), sent[number - 1]));
  }
  const std::vector<const void*> places{first.data(), nullptr, nullptr, fourth.data()};
  for (std::size_t index = 0; index < sent.size(); ++index) {
    ASSERT_TRUE(eventually([&] { return channel.until_received().holds(); }));
    const auto slot = channel.slot();
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(slot.data()), slot.size()), sent[index]);
    if (places[index] != nullptr) {
      EXPECT_EQ(slot.data(), places[index]);
    }
    channel.release();
  }
  EXPECT_EQ(first, "first");
  EXPECT_EQ(third, "......");
  EXPECT_EQ(fourth, "forth");
}

// What lies there while the network may still write, which no rank would read.
__attribute__((no_sanitize("thread"))) char as_it_is(const volatile char* place) { return *place; }

// Whoever is told that an operation has failed may do with its memory what he likes.
TEST(ExpectedSegmentsTest, NothingIsWrittenIntoABufferThatIsReleased) {
  RemoteGround ground;
  ReceiveChannel& channel = ground.remote().from(kRemote);
  std::string buffer(100'000, '.');
  const auto half = std::as_writable_bytes(std::span(buffer)).first(50'000);
  channel.expect(1, half);
  channel.expect(2, std::as_writable_bytes(std::span(buffer)).last(50'000));
  FrameHeader begun = collective_segment(ground, 1);
  begun.bytes = 50'000;
  std::string text(reinterpret_cast<const char*>(&begun), sizeof begun);
  text.append(20'000, 'a');
  ASSERT_EQ(::send(ground.connection(), text.data(), text.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(text.size()));
  ASSERT_TRUE(eventually([&] { return as_it_is(&buffer[19'999]) == 'a'; }));

  ground.health().fail(ErrorKind::kAborted, "the test ends it", {});
  std::memset(buffer.data(), '#', buffer.size());
  const std::string rest(30'000, 'b');
  ASSERT_EQ(::send(ground.connection(), rest.data(), rest.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(rest.size()));
  ASSERT_TRUE(ground.send(collective_segment(ground, 2), std::string(50'000, 'c')));
  // What comes after that is understood.
  ASSERT_TRUE(ground.send(
      ground.header(FrameKind::kDeparture, static_cast<std::uint64_t>(Departure::kShutdown)),
      std::string(2, '\1')));
  const RankControl& control = ground.segment().control(kRemote);
  ASSERT_TRUE(eventually([&] { return control.has_left.load() != 0; }));
  EXPECT_TRUE(buffer == std::string(buffer.size(), '#'));
}

}  // namespace
}  // namespace pydist::testing
