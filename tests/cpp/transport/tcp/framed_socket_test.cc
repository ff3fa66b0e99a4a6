#include "transport/tcp/framed_socket.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kBuffer = std::size_t{16} << 10;  // of a FramedSocket

FrameHeader header_number(std::uint64_t number, std::uint64_t group = 1) {
  FrameHeader header;
  header.kind = FrameKind::kSegment;
  header.group = group;
  header.number = number;
  return header;
}

std::string payload_of(std::size_t bytes, std::uint64_t seed) {
  std::string text(bytes, '\0');
  std::minstd_rand random(static_cast<unsigned>(seed + 1));
  for (char& letter : text) {
    letter = static_cast<char>(random());
  }
  return text;
}

// A framed socket, with the other end of its connection and a sink for group 1.
struct Wired {
  explicit Wired(int buffer_bytes = 0) : pair(buffer_bytes), socket(std::move(pair.engine), 7) {}

  bool receive() {
    return socket.receive(
        [this](std::uint64_t group) { return group == 1 && has_sink ? &sink : nullptr; });
  }
  // As whoever waits for the system to tell of something.
  void receive_while_readable() {
    while (!socket.has_ended() && is_readable(socket.fd())) {
      receive();
    }
  }

  SocketPair pair;
  RecordingSink sink;
  bool has_sink = true;
  FramedSocket socket;
};

TEST(FramedSocketTest, TakesFramesOfEverySizeInEverySplit) {
  std::mt19937 random(7);
  for (int round = 0; round < 30; ++round) {
    Wired wired;
    wired.sink.has_place = round % 2 == 0;
    std::vector<std::size_t> sizes{0, 1, 39, 40, kBuffer - 41, kBuffer - 1, kBuffer, kBuffer + 1};
    if (round % 5 == 0) {
      sizes.insert(sizes.end(), {std::size_t{1} << 20, 0, (std::size_t{1} << 20) + 1});
    }
    for (int i = 0; i < 20; ++i) {
      sizes.push_back(random() % (i % 4 == 0 ? 2 * kBuffer : 100));
    }
    std::shuffle(sizes.begin(), sizes.end(), random);
    std::string stream;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      stream += frame_text(header_number(i), payload_of(sizes[i], i));
    }
    const std::size_t most = std::vector<std::size_t>{1'000, 50'000, 400'000}[random() % 3];
    for (std::size_t at = 0; at < stream.size();) {
      at += send_some(wired.pair.test.get(),
                      std::string_view(stream).substr(at, 1 + random() % most));
      wired.receive_while_readable();
    }
    ASSERT_FALSE(wired.socket.has_ended()) << wired.socket.end();
    ASSERT_EQ(wired.sink.frames.size(), sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      ASSERT_EQ(wired.sink.frames[i].header.number, i);
      ASSERT_EQ(wired.sink.frames[i].payload, payload_of(sizes[i], i));
      ASSERT_EQ(wired.sink.frames[i].sender, 7u);
    }
  }
}

TEST(FramedSocketTest, AFrameOfOneByteAfterTheOtherArrives) {
  Wired wired;
  const std::string stream =
      frame_text(header_number(1), "four") + frame_text(header_number(2), payload_of(300, 2));
  for (const char byte : stream) {
    ASSERT_TRUE(send_all(wired.pair.test.get(), std::string(1, byte)));
    wired.receive();
  }
  ASSERT_EQ(wired.sink.frames.size(), 2u);
  EXPECT_EQ(wired.sink.frames[0].payload, "four");
  EXPECT_EQ(wired.sink.frames[1].payload, payload_of(300, 2));
}

// What lies in the buffer of the socket is no news for the system, which would never tell of it.
TEST(FramedSocketTest, LeavesNothingBehindThatTheSystemDoesNotTellOf) {
  for (const std::size_t large : {kBuffer, kBuffer + 1, 3 * kBuffer, 5 * kBuffer}) {
    for (const std::size_t behind : {0, 1, 100}) {
      Wired wired;
      std::string stream;
      for (std::uint64_t number = 0; number < 3; ++number) {
        stream += frame_text(header_number(2 * number), payload_of(large, number));
        stream += frame_text(header_number(2 * number + 1), payload_of(behind, number));
      }
      for (std::size_t at = 0; at < stream.size();) {
        at += send_some(wired.pair.test.get(), std::string_view(stream).substr(at));
        wired.receive_while_readable();
      }
      ASSERT_EQ(wired.sink.frames.size(), 6u) << large << " and " << behind;
    }
  }
}

TEST(FramedSocketTest, DropsFramesOfGroupsThatItDoesNotKnow) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{10}, kBuffer, std::size_t{300'000}}) {
    Wired wired;
    const std::string stream = frame_text(header_number(1, 99), payload_of(bytes, 1)) +
                               frame_text(header_number(2), "after it");
    for (std::size_t at = 0; at < stream.size();) {
      at += send_some(wired.pair.test.get(), std::string_view(stream).substr(at));
      wired.receive_while_readable();
    }
    ASSERT_EQ(wired.sink.frames.size(), 1u) << bytes;
    EXPECT_EQ(wired.sink.frames[0].payload, "after it");
    EXPECT_FALSE(wired.socket.has_ended());
  }
}

TEST(FramedSocketTest, AFrameOfAKindIsDroppedAmidIt) {
  const std::string stream = frame_text(header_number(1), payload_of(1'000, 1));
  for (const FrameKind kind : {FrameKind::kSegment, FrameKind::kAnnounced}) {
    Wired wired;
    ASSERT_TRUE(send_all(wired.pair.test.get(), stream.substr(0, 500)));
    wired.receive_while_readable();
    wired.socket.drop(wired.sink, kind);
    ASSERT_TRUE(send_all(wired.pair.test.get(),
                         stream.substr(500) + frame_text(header_number(2), "after it")));
    wired.receive_while_readable();
    ASSERT_EQ(wired.sink.frames.size(), kind == FrameKind::kSegment ? 1u : 2u);
    EXPECT_EQ(wired.sink.frames.back().payload, "after it");
  }
}

TEST(FramedSocketTest, ASinkThatGoesAmidAFrameIsNotTouchedAgain) {
  for (const bool has_place : {true, false}) {
    for (const std::size_t bytes : {std::size_t{100}, kBuffer + 1, std::size_t{200'000}}) {
      Wired wired;
      const std::string stream = frame_text(header_number(1), payload_of(bytes, 1));
      const std::size_t part = sizeof(FrameHeader) + bytes / 2;
      ASSERT_TRUE(send_all(wired.pair.test.get(), stream.substr(0, part)));
      {
        RecordingSink leaver;
        leaver.has_place = has_place;
        while (is_readable(wired.socket.fd())) {
          wired.socket.receive([&](std::uint64_t) { return &leaver; });
        }
        wired.socket.drop(wired.sink);  // another one
        wired.socket.drop(leaver);
      }
      ASSERT_TRUE(send_all(wired.pair.test.get(),
                           stream.substr(part) + frame_text(header_number(2), "after it")));
      wired.receive_while_readable();
      ASSERT_FALSE(wired.socket.has_ended()) << wired.socket.end();
      ASSERT_EQ(wired.sink.frames.size(), 1u);
      EXPECT_EQ(wired.sink.frames[0].payload, "after it");
    }
  }
}

TEST(FramedSocketTest, AnEndBetweenFramesNeedsNoReason) {
  Wired wired;
  ASSERT_TRUE(send_all(wired.pair.test.get(), frame_text(header_number(1), "last")));
  wired.pair.test = FileDescriptor();
  wired.receive_while_readable();
  EXPECT_TRUE(wired.socket.has_ended());
  EXPECT_EQ(wired.socket.end(), "");
  EXPECT_EQ(wired.sink.frames.size(), 1u);
  EXPECT_FALSE(wired.receive());
}

TEST(FramedSocketTest, AnEndAmidAFrameIsTold) {
  const std::string stream = frame_text(header_number(1), payload_of(kBuffer + 100, 1));
  for (const std::size_t cut : {std::size_t{1}, std::size_t{39}, std::size_t{40}, std::size_t{41},
                                kBuffer, kBuffer + 41, stream.size() - 1}) {
    Wired wired;
    ASSERT_TRUE(send_all(wired.pair.test.get(), stream.substr(0, cut)));
    ::shutdown(wired.pair.test.get(), SHUT_WR);
    wired.receive_while_readable();
    ASSERT_TRUE(wired.socket.has_ended()) << cut;
    EXPECT_TRUE(contains(wired.socket.end(), "amid a frame")) << cut << wired.socket.end();
    EXPECT_TRUE(wired.sink.frames.empty());
  }
}

TEST(FramedSocketTest, WhatIsNoFrameEndsIt) {
  const auto with = [](const auto& change) {
    FrameHeader header = header_number(1);
    change(header);
    return std::string(reinterpret_cast<const char*>(&header), sizeof header);
  };
  const std::vector<std::string> nonsense = {
      with([](FrameHeader& header) { header.magic ^= 1; }),
      with([](FrameHeader& header) { header.kind = static_cast<FrameKind>(0); }),
      with([](FrameHeader& header) { header.kind = static_cast<FrameKind>(255); }),
      with([](FrameHeader& header) {
        header.kind = static_cast<FrameKind>(static_cast<int>(FrameKind::kLast) + 1);
      }),
      with([](FrameHeader& header) { header.bytes = kMostPayload + 1; }),
      with([](FrameHeader& header) { header.bytes = UINT32_MAX; }),
      std::string(40, '\0'),
      std::string(40, '\xff'),
      "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
  };
  for (const bool has_sink : {true, false}) {
    for (const std::string& bytes : nonsense) {
      Wired wired;
      wired.has_sink = has_sink;
      ASSERT_TRUE(send_all(wired.pair.test.get(), frame_text(header_number(1), "first") + bytes));
      wired.receive_while_readable();
      ASSERT_TRUE(wired.socket.has_ended());
      EXPECT_TRUE(contains(wired.socket.end(), "makes no sense")) << wired.socket.end();
      EXPECT_EQ(wired.sink.frames.size(), has_sink ? 1u : 0u);
    }
  }
}

TEST(FramedSocketTest, WhatASinkRefusesEndsIt) {
  for (const bool refuses_place : {true, false}) {
    Wired wired;
    const auto refuse = [](const auto&) { throw BadFrame("it is out of order."); };
    if (refuses_place) {
      wired.sink.on_place = refuse;
    } else {
      wired.sink.on_take = refuse;
    }
    ASSERT_TRUE(send_all(wired.pair.test.get(), frame_text(header_number(1), "no") +
                                                    frame_text(header_number(2), "nor this")));
    wired.receive_while_readable();
    ASSERT_TRUE(wired.socket.has_ended());
    EXPECT_TRUE(contains(wired.socket.end(), "it is out of order")) << wired.socket.end();
    EXPECT_LE(wired.sink.frames.size(), 1u);
  }
}

TEST(FramedSocketTest, WritesWhatTheSystemTakesAndGoesOnThere) {
  Wired wired(/*buffer_bytes=*/8'192);
  // More than are given to the system at once; the ends of writes fall into each of them, and the
  // one without a payload.
  const std::vector<std::size_t> sizes{1 << 20, 3, 0, 300'000, 50'001};
  std::vector<std::string> payloads;
  std::vector<OutgoingFrame> frames(sizes.size());
  std::string expected;
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    payloads.push_back(payload_of(sizes[index], index));
    expected += frame_text(header_number(index), payloads.back());
  }
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    frames[index].header = header_number(index);
    frames[index].header.bytes = static_cast<std::uint32_t>(sizes[index]);
    frames[index].data = reinterpret_cast<const std::byte*>(payloads[index].data());
  }
  std::string received;
  int writes = 0;
  std::span<OutgoingFrame> rest(frames);
  while (!rest.empty()) {
    wired.socket.write(rest);
    while (!rest.empty() && rest.front().is_written()) {
      rest = rest.subspan(1);
    }
    ++writes;
    received += receive_some(wired.pair.test.get(), 5'000);
  }
  received += receive_all(wired.pair.test.get(), expected.size() - received.size());
  EXPECT_EQ(received, expected);
  EXPECT_GT(writes, 10);
}

TEST(FramedSocketTest, WritingToNobodyThrows) {
  Wired wired;
  wired.pair.test = FileDescriptor();
  OutgoingFrame frame;
  frame.header = header_number(1);
  EXPECT_THROW(wired.socket.write({&frame, 1}), TransportError);
}

TEST(FramedSocketTest, AfterTheLastWriteTheOtherEndReadsTheEnd) {
  Wired wired;
  OutgoingFrame frame;
  frame.header = header_number(1);
  wired.socket.write({&frame, 1});
  wired.socket.finish_writing();
  EXPECT_EQ(receive_all(wired.pair.test.get(), 1'000), frame_text(header_number(1)));
  // The other way is still open.
  ASSERT_TRUE(send_all(wired.pair.test.get(), frame_text(header_number(2), "x")));
  wired.receive_while_readable();
  EXPECT_EQ(wired.sink.frames.size(), 1u);
}

}  // namespace
}  // namespace pydist::testing
