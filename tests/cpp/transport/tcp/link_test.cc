#include "transport/tcp/link.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

constexpr std::uint64_t kLinkGroup = 5;
// Far more than the connections of these tests take.
constexpr std::size_t kSegment = std::size_t{512} << 10;

FrameHeader small_frame(std::uint64_t number, std::uint64_t group = kLinkGroup) {
  FrameHeader header;
  header.kind = FrameKind::kHeard;
  header.group = group;
  header.number = number;
  return header;
}

// A segment, which lies in memory of its own.
struct Sent {
  explicit Sent(std::uint64_t number, std::uint64_t group = kLinkGroup,
                std::size_t bytes = kSegment)
      : data(bytes, static_cast<char>('a' + number)) {
    header.kind = FrameKind::kSegment;
    header.group = group;
    header.number = number;
    header.bytes = static_cast<std::uint32_t>(bytes);
  }
  void go(Link& link, Counter& written) const {
    link.send_segment(header, reinterpret_cast<const std::byte*>(data.data()), written);
  }
  // The memory is used for something else, and goes.
  void spoil() {
    data.assign(data.size(), '#');
    data.clear();
    data.shrink_to_fit();
  }

  FrameHeader header;
  std::string data;
};

// A link, and the other ends of its connections.
class Ends {
 public:
  explicit Ends(std::size_t connections) {
    for (std::size_t i = 0; i < connections; ++i) {
      connect();
    }
  }
  void connect() {
    SocketPair pair(/*buffer_bytes=*/16 << 10);
    link.add(std::move(pair.engine));
    others_.push_back(
        {std::make_unique<RecordingSink>(),
         std::make_unique<FramedSocket>(std::move(pair.test), /*sender=*/others_.size())});
  }
  // Reads one connection until it has nothing more, while the link sends on.
  void drain(std::size_t index) {
    while (is_readable(others_[index].socket->fd()) && !others_[index].socket->has_ended()) {
      others_[index].socket->receive([&](std::uint64_t) { return others_[index].sink.get(); });
      link.flush();
    }
  }
  void drain_all() {
    for (std::size_t index = 0; index < others_.size(); ++index) {
      drain(index);
    }
  }
  void close(std::size_t index) { others_[index].socket = nullptr; }
  [[nodiscard]] std::vector<RecordingSink::Frame>& frames(std::size_t index) {
    return others_[index].sink->frames;
  }
  // What a sender of the other process writes.
  [[nodiscard]] int raw(std::size_t index) const { return others_[index].socket->fd(); }

  std::atomic<int> wakes = 0;
  std::vector<std::string> losses;
  Link link{"the peer", 3, [this] { ++wakes; },
            [this](const std::string& why) { losses.push_back(why); }};

 private:
  struct Other {
    std::unique_ptr<RecordingSink> sink;
    std::unique_ptr<FramedSocket> socket;
  };
  std::vector<Other> others_;
};

TEST(LinkTest, WhatIsSentBeforeThereIsAConnectionGoesOutInOrder) {
  Ends ends(0);
  const std::string payload = "some text";
  for (std::uint64_t number = 1; number <= 5; ++number) {
    ends.link.send(small_frame(number), std::as_bytes(std::span(payload)));
    EXPECT_EQ(ends.wakes, static_cast<int>(number));
  }
  Counter written{0};
  const Sent segment(9, kLinkGroup, 100);
  segment.go(ends.link, written);
  EXPECT_FALSE(ends.link.is_up());
  EXPECT_TRUE(ends.link.has_to_send());
  EXPECT_EQ(written.load(), 0u);
  ends.connect();
  EXPECT_TRUE(ends.link.is_up());
  EXPECT_FALSE(ends.link.has_to_send());
  EXPECT_EQ(written.load(), 1u);
  ends.drain(0);
  ASSERT_EQ(ends.frames(0).size(), 6u);
  for (std::uint64_t number = 1; number <= 5; ++number) {
    EXPECT_EQ(ends.frames(0)[number - 1].header.number, number);
    EXPECT_EQ(ends.frames(0)[number - 1].payload, payload);
  }
  EXPECT_EQ(ends.frames(0)[5].payload, segment.data);
}

TEST(LinkTest, WhatTheSystemTakesAtOnceWakesNobody) {
  Ends ends(2);
  Counter written{0};
  ends.link.send(small_frame(1));
  const Sent segment(2, kLinkGroup, 1'000);
  segment.go(ends.link, written);
  EXPECT_EQ(written.load(), 1u);
  EXPECT_EQ(ends.wakes, 0);
  EXPECT_FALSE(ends.link.has_to_send());
}

TEST(LinkTest, TheConnectionThatIsFreeTakesTheSegmentsThatWait) {
  Ends ends(3);
  Counter written{0};
  std::vector<Sent> segments;
  for (std::uint64_t number = 0; number < 8; ++number) {
    segments.emplace_back(number);
  }
  for (const Sent& segment : segments) {
    segment.go(ends.link, written);
  }
  EXPECT_EQ(written.load(), 0u);
  EXPECT_TRUE(ends.link.has_to_send());
  // The first two connections are stuck: all but what they have begun goes over the third.
  ends.drain(2);
  EXPECT_EQ(written.load(), 6u);
  ASSERT_EQ(ends.frames(2).size(), 6u);
  // Out of order, as the receiver sees it.
  std::uint64_t expected = 2;
  for (const RecordingSink::Frame& frame : ends.frames(2)) {
    EXPECT_EQ(frame.header.number, expected);
    EXPECT_EQ(frame.payload, segments[expected].data);
    ++expected;
  }
  ends.drain_all();
  EXPECT_EQ(written.load(), 8u);
  EXPECT_EQ(ends.frames(0).size(), 1u);
  EXPECT_EQ(ends.frames(1).size(), 1u);
  EXPECT_EQ(ends.frames(0)[0].payload, segments[0].data);
  EXPECT_EQ(ends.frames(1)[0].payload, segments[1].data);
  EXPECT_FALSE(ends.link.has_to_send());
}

TEST(LinkTest, SmallFramesKeepTheirOrderBehindASegment) {
  Ends ends(1);
  Counter written{0};
  const Sent segment(0);
  segment.go(ends.link, written);
  std::string payload = "kept";
  for (std::uint64_t number = 1; number <= 300; ++number) {
    ends.link.send(small_frame(number), std::as_bytes(std::span(payload)));
  }
  payload = "gone";  // the link has a copy
  ends.drain(0);
  ASSERT_EQ(ends.frames(0).size(), 301u);
  EXPECT_EQ(ends.frames(0)[0].payload, segment.data);
  for (std::uint64_t number = 1; number <= 300; ++number) {
    ASSERT_EQ(ends.frames(0)[number].header.number, number);
    ASSERT_EQ(ends.frames(0)[number].payload, "kept");
  }
}

TEST(LinkTest, AReleasedSegmentGoesOutAllTheSame) {
  Ends ends(2);
  Counter written{0};
  std::vector<Sent> segments;
  for (std::uint64_t number = 0; number < 5; ++number) {
    segments.emplace_back(number);
  }
  const Sent of_another_group(9, kLinkGroup + 1);
  Counter written_of_the_other{0};
  for (const Sent& segment : segments) {
    segment.go(ends.link, written);
  }
  of_another_group.go(ends.link, written_of_the_other);
  ends.link.send(small_frame(7));
  EXPECT_EQ(written.load(), 0u);

  ends.link.release_segments(kLinkGroup);
  EXPECT_EQ(written.load(), 5u);
  EXPECT_EQ(written_of_the_other.load(), 0u);
  for (Sent& segment : segments) {
    segment.spoil();
  }
  ends.link.release_segments(kLinkGroup);
  ends.drain_all();
  // Counted once, although they were written after that.
  EXPECT_EQ(written.load(), 5u);
  EXPECT_EQ(written_of_the_other.load(), 1u);
  std::multiset<std::uint64_t> numbers;
  for (const std::size_t index : {0, 1}) {
    for (const RecordingSink::Frame& frame : ends.frames(index)) {
      numbers.insert(frame.header.number);
      if (frame.header.kind == FrameKind::kSegment) {
        EXPECT_EQ(frame.payload,
                  std::string(kSegment, static_cast<char>('a' + frame.header.number)));
      }
    }
  }
  EXPECT_EQ(numbers, (std::multiset<std::uint64_t>{0, 1, 2, 3, 4, 7, 9}));
}

TEST(LinkTest, ALossCountsWhatWasNotWritten) {
  Ends ends(2);
  Counter written{0};
  std::vector<Sent> segments;
  for (std::uint64_t number = 0; number < 5; ++number) {
    segments.emplace_back(number).go(ends.link, written);
  }
  ends.link.send(small_frame(1));
  ends.link.lose("the cable is cut");
  EXPECT_EQ(written.load(), 5u);
  EXPECT_TRUE(ends.link.is_lost());
  EXPECT_FALSE(ends.link.is_up());
  EXPECT_FALSE(ends.link.has_to_send());
  EXPECT_EQ(ends.losses, std::vector<std::string>{"the cable is cut"});

  segments[0].go(ends.link, written);
  ends.link.send(small_frame(2));
  ends.link.flush();
  ends.link.release_segments(kLinkGroup);
  EXPECT_EQ(written.load(), 6u);
  EXPECT_FALSE(ends.link.has_to_send());
  ends.link.lose("again");
  EXPECT_EQ(ends.losses.size(), 1u);
}

TEST(LinkTest, ALossBeforeAnyConnectionCountsToo) {
  Ends ends(0);
  Counter written{0};
  const Sent segment(0);
  segment.go(ends.link, written);
  ends.link.lose("");
  EXPECT_EQ(written.load(), 1u);
  EXPECT_EQ(ends.losses, std::vector<std::string>{""});
}

TEST(LinkTest, WritingToAClosedConnectionEndsTheLinkWithAReason) {
  Ends ends(1);
  EXPECT_EQ(ends.link.end(), std::nullopt);
  ends.close(0);
  Counter written{0};
  const Sent segment(0);
  segment.go(ends.link, written);
  EXPECT_EQ(written.load(), 1u);  // nobody needs it any more
  EXPECT_GT(ends.wakes, 0);
  EXPECT_TRUE(ends.link.is_ending());
  EXPECT_TRUE(eventually([&] {
    static_cast<void>(ends.link.receive([](std::uint64_t) { return nullptr; }));
    return ends.link.end().has_value();
  }));
  EXPECT_NE(*ends.link.end(), "");
}

TEST(LinkTest, ItIsOverOnceAllConnectionsHaveEnded) {
  Ends ends(2);
  ASSERT_TRUE(send_all(ends.raw(1), frame_text(small_frame(1), "the last words")));
  ends.close(0);
  RecordingSink sink;
  const auto sink_of = [&](std::uint64_t) { return &sink; };
  const auto has_come = [&] { return ends.link.receive(sink_of) && sink.frames.size() == 1; };
  EXPECT_TRUE(eventually(has_come));
  EXPECT_EQ(ends.link.end(), std::nullopt);
  EXPECT_TRUE(ends.link.is_ending());
  ends.close(1);
  EXPECT_TRUE(eventually([&] {
    static_cast<void>(ends.link.receive(sink_of));
    return ends.link.end().has_value();
  }));
  EXPECT_EQ(*ends.link.end(), "");
}

// One that is left open does not keep a process alive whose other connection has ended.
TEST(LinkTest, OneConnectionThatStaysOpenIsNotWaitedForForLong) {
  Ends ends(2);
  ASSERT_TRUE(send_all(ends.raw(0), "no frame, but enough of it to be taken for a header of one"));
  const auto nobody = [](std::uint64_t) -> FrameSink* { return nullptr; };
  EXPECT_TRUE(eventually([&] {
    static_cast<void>(ends.link.receive(nobody));
    return ends.link.end().has_value();
  }));
  EXPECT_TRUE(contains(*ends.link.end(), "makes no sense")) << *ends.link.end();
}

// Two threads send while the server flushes and the other end reads.
TEST(LinkTest, ManyThreadsSendAtOnce) {
  Ends ends(2);
  constexpr std::uint64_t kEach = 200;
  Counter written{0};
  const Sent segment(0, kLinkGroup, 30'000);
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t number = 0; number < kEach; ++number) {
        segment.go(ends.link, written);
        ends.link.send(small_frame(thread * kEach + number, /*group=*/thread));
      }
    });
  }
  const auto count = [&] { return ends.frames(0).size() + ends.frames(1).size(); };
  EXPECT_TRUE(eventually([&] {
    ends.link.flush();
    ends.drain_all();
    return count() == 4 * kEach;
  }));
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(written.load(), 2 * kEach);
  std::vector<std::uint64_t> next{0, kEach};
  for (const RecordingSink::Frame& frame : ends.frames(0)) {
    if (frame.header.kind == FrameKind::kHeard) {
      ASSERT_EQ(frame.header.number, next[frame.header.group]++);
    }
  }
}

}  // namespace
}  // namespace pydist::testing
