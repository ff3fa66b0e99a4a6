// What a rank of another host sends, and what it never would: the engine checks each frame before
// it writes to the memory of its host. The file is long because there is nonsense of every kind of
// frame, beside what makes sense.

#include "communicator/peers/remote_ranks.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "communicator/departure.h"
#include "communicator/peers/remote_rank.h"
#include "ranks.h"
#include "topology/told_error.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

// A post as it travels.
std::string post_text(std::uint8_t flags = 0, int rank = kRemote, std::uint64_t eager_bytes = 0) {
  Post post{};
  post.kind = OpKind::kAllReduce;
  post.flags = flags;
  post.count = 77;
  const bool has_lines = post.offer() == Offer::kInLines;
  PostDetail detail;
  detail.total = 78;
  detail.eager_bytes = eager_bytes;
  const auto bytes_of = [](const auto& value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  return bytes_of(std::int32_t{rank}) +
         bytes_of(post).substr(
             sizeof(Counter), (has_lines ? sizeof post : offsetof(Post, lines)) - sizeof(Counter)) +
         bytes_of(detail) +
         std::string((flags & Post::kRagged) != 0 ? kRemoteSize * sizeof(std::uint64_t) : 0, '\1');
}

FrameHeader ahead_of_post(const RemoteGround& ground, std::uint64_t round) {
  FrameHeader header = ground.header(FrameKind::kEager, round);
  header.extra = kRemote;
  return header;
}

std::size_t message_slot_bytes(const RemoteGround& ground) {
  return ground.messages().channel(kRemote, 0).slot_bytes;
}

// -- what a rank sends ----------------------------------------------------------------------------

TEST(RemoteRanksTest, APostIsWrittenToThePlaceOfItsRank) {
  RemoteGround ground;
  for (std::uint64_t number = 1; number <= 2 * kPostDepth; ++number) {
    ASSERT_TRUE(ground.send(ground.header(FrameKind::kPost, number), post_text(Post::kRagged)));
  }
  RankControl& control = ground.segment().control(kRemote);
  const std::size_t slot = 2 * kPostDepth % kPostDepth;
  ASSERT_TRUE(eventually([&] { return control.posts[slot].sequence.load() == 2 * kPostDepth; }));
  EXPECT_EQ(control.posts[slot].count, 77u);
  EXPECT_EQ(control.details[slot].total, 78u);
  EXPECT_EQ(ground.segment().block_counts(kRemote, slot)[2], 0x0101010101010101u);
  EXPECT_EQ(ground.segment().control(1).posts[slot].sequence.load(), 0u);
}

TEST(RemoteRanksTest, DataAheadOfAPostLiesInTheTransitOfItsRank) {
  RemoteGround ground;
  ASSERT_TRUE(ground.send(ahead_of_post(ground, 6), std::string(kRemoteChunkBytes, 'e')));
  ASSERT_TRUE(
      ground.send(ground.header(FrameKind::kPost, 1),
                  post_text(static_cast<std::uint8_t>(Offer::kEager), kRemote, kRemoteChunkBytes)));
  ASSERT_TRUE(
      eventually([&] { return ground.segment().control(kRemote).posts[1].sequence.load() == 1; }));
  const std::byte* const transit = ground.segment().transit(kRemote, 6);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(transit), kRemoteChunkBytes),
            std::string(kRemoteChunkBytes, 'e'));
}

TEST(RemoteRanksTest, ADepositIsThereOnceItIsCounted) {
  RemoteGround ground;
  ASSERT_TRUE(ground.send(ground.header(FrameKind::kDeposit, 7), "deposit"));
  const RankControl& control = ground.segment().control(kRemote);
  ASSERT_TRUE(eventually([&] { return control.deposited.load() == 8; }));
  const std::byte* const transit = ground.segment().transit(kRemote, 7);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(transit), 7), "deposit");
  const RankControl::Arrival& arrival = control.arrivals[7 % kTransitSlots];
  EXPECT_EQ(arrival.round, 7u);
  EXPECT_EQ(arrival.bytes, 7u);
}

// A rank that has failed may have had no memory for what came ahead.
TEST(RemoteRanksTest, WhatIsAnnouncedOnceTheGroupHasFailedIsDropped) {
  RemoteGround ground;
  ground.health().fail(ErrorKind::kTransport, "no memory");
  ASSERT_TRUE(ground.send(ground.header(FrameKind::kPost, 1), post_text(0, kRemote, 4)));
  ASSERT_TRUE(ground.send(ground.header(FrameKind::kDeposit, 7), "deposit"));
  ASSERT_TRUE(ground.send(FrameHeader()));
  EXPECT_TRUE(eventually([&] { return ground.far().mirror->heartbeat_ns.load() != 0; }));
  const RankControl& control = ground.segment().control(kRemote);
  EXPECT_EQ(control.posts[1].sequence.load(), 0u);
  EXPECT_EQ(control.deposited.load(), 0u);
  EXPECT_FALSE(ground.far().is_dead.load());
}

TEST(RemoteRanksTest, SegmentsArriveInOrderHoweverTheyCome) {
  for (const LaneSet set : {LaneSet::kMessages, LaneSet::kCollectives}) {
    RemoteGround ground;
    const std::unique_ptr<ReceiveChannel> of_messages = ground.remote().make_receiver(kRemote);
    ReceiveChannel& channel =
        set == LaneSet::kMessages ? *of_messages : ground.remote().from(kRemote);
    std::uint64_t expected = 1;
    for (const auto& order : {std::vector<std::uint64_t>{2, 4, 1, 3}, {5, 8, 7, 6}}) {
      for (const std::uint64_t number : order) {
        FrameHeader header = ground.header(FrameKind::kSegment, number);
        header.lanes = static_cast<std::uint8_t>(set);
        ASSERT_TRUE(ground.send(header, std::string(number, static_cast<char>('a' + number))));
      }
      for (const std::uint64_t end = expected + 4; expected < end; ++expected) {
        ASSERT_TRUE(eventually([&] { return channel.until_received().holds(); })) << expected;
        const auto slot = channel.slot();
        ASSERT_EQ(std::string(reinterpret_cast<const char*>(slot.data()), slot.size()),
                  std::string(expected, static_cast<char>('a' + expected)));
        channel.release();
      }
    }
    EXPECT_FALSE(channel.until_received().holds());
    // Slots of collectives are released in pairs.
    const std::uint64_t step = set == LaneSet::kMessages ? 1 : 2;
    for (std::uint64_t number = step; number <= 8; number += step) {
      const std::optional<std::string> released = ground.receive(FrameKind::kReleased);
      ASSERT_TRUE(released);
      FrameHeader header;
      std::memcpy(&header, released->data(), sizeof header);
      EXPECT_EQ(header.number, number);
      EXPECT_EQ(header.lanes, static_cast<std::uint8_t>(set));
      EXPECT_EQ(header.receiver, kRemote);
    }
  }
}

TEST(RemoteRanksTest, ADepartureIsSeenOnceAllSegmentsHaveCome) {
  RemoteGround ground;
  FrameHeader departure =
      ground.header(FrameKind::kDeparture, static_cast<std::uint64_t>(Departure::kShutdown));
  departure.extra = 12;
  ASSERT_TRUE(ground.send(ground.header(FrameKind::kLastSegment, 2)));
  ASSERT_TRUE(ground.send(departure, std::string(2, '\1')));
  RankControl& control = ground.segment().control(kRemote);
  ASSERT_TRUE(eventually([&] { return control.has_left.load() != 0; }));
  EXPECT_EQ(control.farewell.load(), 12u);
  EXPECT_FALSE(ground.remote().is_gone(kRemote));
  EXPECT_FALSE(ground.health().why_vain(kRemote));
  for (const std::uint64_t number : {2, 1}) {
    EXPECT_FALSE(ground.remote().is_gone(kRemote));
    ASSERT_TRUE(ground.send(ground.header(FrameKind::kSegment, number), "x"));
  }
  EXPECT_TRUE(eventually([&] { return ground.remote().is_gone(kRemote); }));
  ASSERT_TRUE(ground.health().why_vain(kRemote));
  EXPECT_EQ(ground.health().why_vain(kRemote)->blame.ranks, std::vector<int>{kRemote});
}

// The rank takes the connection for made before this one does, and may send, leave, and have that
// told by its counterpart in between.
TEST(RemoteRanksTest, ADepartureWaitsForAConnectionThatStandsAtTheOtherEndAlone) {
  for (const bool is_connected_there : {true, false}) {
    RemoteGround ground(0, /*connects=*/false);
    ground.messages().counters(kRemote, 0).awaits_last_segment.store(is_connected_there ? 1 : 0);
    ground.segment().control(kRemote).has_left.store(
        static_cast<std::uint32_t>(Departure::kShutdown));
    EXPECT_EQ(ground.remote().is_gone(kRemote), !is_connected_there);
    EXPECT_EQ(ground.health().why_vain(kRemote).has_value(), !is_connected_there);
  }
}

TEST(RemoteRanksTest, ARankThatEndsWithoutAWordForTheGroupIsGoneForItsCounterpartsHost) {
  RemoteGround ground;
  ASSERT_EQ(ground.remote().placement().counterpart(kRemote, 0), 0);
  FrameHeader goodbye;
  goodbye.kind = FrameKind::kGoodbye;
  ASSERT_TRUE(ground.send(goodbye));
  ASSERT_TRUE(eventually([&] { return ground.far().has_departed(); }));
  EXPECT_FALSE(ground.remote().is_gone(kRemote));
  ground.disconnect();
  EXPECT_TRUE(eventually([&] { return ground.remote().is_gone(kRemote); }));
  // The link is lost a moment before its sinks hear of it.
  EXPECT_TRUE(eventually([&] {
    return ground.segment().control(kRemote).has_left.load() ==
           static_cast<std::uint32_t>(Departure::kProgramEnd);
  }));
}

// Its last post may still be on its way to the counterpart, rank 0.
TEST(RemoteRanksTest, ALostConnectionOfAnotherThanTheCounterpartSaysNothingOfPosts) {
  RemoteGround ground(1);
  FrameHeader goodbye;
  goodbye.kind = FrameKind::kGoodbye;
  ASSERT_TRUE(ground.send(goodbye));
  ground.disconnect();
  ASSERT_TRUE(eventually([&] { return ground.link().is_lost() && ground.far().is_dead.load(); }));
  EXPECT_FALSE(ground.health().why_vain(kRemote));
  ground.segment().control(kRemote).has_left.store(
      static_cast<std::uint32_t>(Departure::kProgramEnd));
  EXPECT_TRUE(ground.health().why_vain(kRemote));
}

TEST(RemoteRanksTest, AFailureIsTheGroupsError) {
  RemoteGround ground;
  const ToldError told{kRemote, {ErrorKind::kMismatch, "the shapes differ", Blame{.ranks = {2}}}};
  ASSERT_TRUE(ground.send(ground.header(FrameKind::kFailure), told.to_text()));
  ASSERT_TRUE(eventually([&] { return ground.health().has_failed(); }));
  const ErrorDescription error = describe(ground.health().failure());
  EXPECT_EQ(error.kind, ErrorKind::kMismatch);
  EXPECT_TRUE(contains(error.message, "the shapes differ"));
  EXPECT_EQ(error.blame.ranks, std::vector<int>{2});
}

TEST(RemoteRanksTest, APageIsAnsweredAndMirrored) {
  RemoteGround ground;
  ground.endpoint().page().pid.store(4711);
  FrameHeader request = ground.header(FrameKind::kPageRequest);
  request.number = 1;
  ASSERT_TRUE(ground.send(request));
  const std::optional<std::string> answer = ground.receive(FrameKind::kPage);
  ASSERT_TRUE(answer);
  FrameHeader header;
  std::memcpy(&header, answer->data(), sizeof header);
  EXPECT_EQ(header.sender, 1);
  ASSERT_EQ(header.bytes, sizeof(ProcessPage));
  header.sender = kRemote;
  ASSERT_TRUE(ground.send(header, answer->substr(sizeof header)));
  EXPECT_TRUE(eventually([&] { return ground.far().page->pid.load() == 4711; }));
}

TEST(RemoteRanksTest, AfterTheEndFramesAreDropped) {
  RemoteGround ground;
  ground.remote().stop();
  ASSERT_TRUE(ground.send(ground.header(FrameKind::kPost, 1), "no post at all"));
  FrameHeader beat;
  ASSERT_TRUE(ground.send(beat));
  EXPECT_TRUE(eventually([&] { return ground.far().mirror->heartbeat_ns.load() != 0; }));
  EXPECT_FALSE(ground.far().is_dead.load());
}

// -- what a rank that leaves has sent -------------------------------------------------------------

TEST(RemoteRanksTest, WhatWasSentBeforeARankLeavesArrives) {
  RemoteGround ground;
  const std::unique_ptr<SendChannel> channel = ground.remote().make_sender(kRemote);
  ground.fill_link();
  for (std::uint64_t number = 1; number <= 3; ++number) {
    ASSERT_TRUE(channel->until_free().holds());
    std::memset(channel->slot(), static_cast<int>('0' + number), 1'000);
    channel->send(1'000);
  }
  EXPECT_FALSE(channel->until_written().holds());
  ground.health().leave();
  EXPECT_TRUE(channel->until_written().holds());
  std::memset(channel->slot(), '#', 1'000);
  std::memset(ground.messages().channel(0, kRemote).slots, '#', 1'000);
  for (std::uint64_t number = 1; number <= 3; ++number) {
    const std::optional<std::string> segment = ground.receive(FrameKind::kSegment);
    ASSERT_TRUE(segment) << number;
    EXPECT_EQ(segment->substr(sizeof(FrameHeader)),
              std::string(1'000, static_cast<char>('0' + number)));
  }
}

// -- what no rank sends ---------------------------------------------------------------------------

struct Nonsense {
  std::string what;
  FrameHeader header;
  std::string payload;
};

std::vector<Nonsense> all_nonsense(const RemoteGround& ground) {
  std::vector<Nonsense> all;
  const auto add = [&](const std::string& what, FrameHeader header, std::string payload = {}) {
    all.push_back({what, header, std::move(payload)});
  };
  const auto with = [&](FrameKind kind, const std::function<void(FrameHeader&)>& change,
                        std::uint64_t number = 0) {
    FrameHeader header = ground.header(kind, number);
    change(header);
    return header;
  };
  constexpr std::uint64_t kHuge = UINT64_MAX;
  const std::size_t slot = message_slot_bytes(ground);

  // Whatever comes from a rank has to come from its process.
  const std::vector<std::pair<FrameKind, std::string>> right = {
      {FrameKind::kPost, post_text()},
      {FrameKind::kEager, "data"},
      {FrameKind::kDeposit, "data"},
      {FrameKind::kSegment, "data"},
      {FrameKind::kReleased, ""},
      {FrameKind::kAnnounced, std::string(sizeof(Announcement), '\0')},
      {FrameKind::kHeard, ""},
      {FrameKind::kGranted, ""},
      {FrameKind::kFailure, ToldError{2, {ErrorKind::kError, "x", {}}}.to_text()},
      {FrameKind::kDeparture, std::string(2, '\1')},
      {FrameKind::kLastSegment, ""},
      {FrameKind::kPageRequest, ""},
      {FrameKind::kPage, std::string(sizeof(ProcessPage), '\0')},
  };
  for (const auto& [kind, payload] : right) {
    for (const int sender : {0, 1, kRemoteSize, -1, INT32_MAX, INT32_MIN}) {
      add(join("sender ", sender),
          with(kind, [&](FrameHeader& header) { header.sender = sender; }, 1), payload);
    }
  }
  // What is for one rank is not for another.
  for (const auto& [kind, payload] : right) {
    const bool is_for_one = kind == FrameKind::kSegment || kind == FrameKind::kReleased ||
                            kind == FrameKind::kAnnounced || kind == FrameKind::kHeard ||
                            kind == FrameKind::kGranted;
    for (const int receiver : {1, 2, kRemoteSize, -1, INT32_MAX}) {
      if (is_for_one) {
        const std::uint64_t number = kind == FrameKind::kSegment ? 1 : 0;
        add(join("receiver ", receiver),
            with(kind, [&](FrameHeader& header) { header.receiver = receiver; }, number), payload);
      }
    }
  }
  for (const std::uint64_t rank : {std::uint64_t{2}, std::uint64_t{kRemoteSize}, UINT64_MAX}) {
    add(join("the page of rank ", rank), with(FrameKind::kPageRequest, [](FrameHeader&) {}, rank));
  }
  // Those without a payload have none.
  for (const FrameKind kind : {FrameKind::kReleased, FrameKind::kHeard, FrameKind::kGranted,
                               FrameKind::kLastSegment, FrameKind::kPageRequest}) {
    add("a payload", ground.header(kind), "x");
  }
  for (const std::size_t bytes : {0, 1, 3, 4096}) {
    add("not one byte a rank", ground.header(FrameKind::kDeparture), std::string(bytes, '\1'));
  }
  // Kinds that no group has.
  add("of the process", ground.header(FrameKind::kHeartbeat));
  add("of the process", ground.header(FrameKind::kGoodbye));
  // Sets of lanes that there are not.
  for (const FrameKind kind : {FrameKind::kSegment, FrameKind::kReleased}) {
    for (const std::uint8_t lanes : {2, 255}) {
      add(join("lanes ", int{lanes}),
          with(kind, [&](FrameHeader& header) { header.lanes = lanes; }, 1));
    }
  }

  add("size 0", ground.header(FrameKind::kPost, 1));
  for (const std::uint8_t flags :
       {std::uint8_t{0}, std::uint8_t{Post::kRagged}, static_cast<std::uint8_t>(Offer::kInLines)}) {
    const std::string post = post_text(flags);
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{4}, post.size() - 1}) {
      add("too short", ground.header(FrameKind::kPost, 1), post.substr(0, bytes));
    }
    add("too long", ground.header(FrameKind::kPost, 1), post + std::string(1, '\0'));
    add("the same twice", ground.header(FrameKind::kPost, 1), post + post);
  }
  for (const int rank : {-1, 0, 1, kRemoteSize, INT32_MAX, INT32_MIN}) {
    add(join("a post of rank ", rank), ground.header(FrameKind::kPost, 1), post_text(0, rank));
  }
  for (const std::uint64_t rank : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{kRemoteSize},
                                   std::uint64_t{1} << 32, kHuge}) {
    FrameHeader of_rank = ground.header(FrameKind::kEager, 1);
    of_rank.extra = rank;
    add(join("ahead of a post of rank ", rank), of_rank, "data");
  }
  add("nothing ahead of it", ground.header(FrameKind::kPost, 1), post_text(0, kRemote, 4));
  add("more than a chunk", ground.header(FrameKind::kDeposit, 1),
      std::string(kRemoteChunkBytes + 1, 'x'));
  add("number 0", ground.header(FrameKind::kPost, 0), post_text());
  add("more than a chunk", ahead_of_post(ground, 1), std::string(kRemoteChunkBytes + 1, 'x'));
  add("more than a slot", ground.header(FrameKind::kSegment, 1), std::string(slot + 1, 'x'));
  add("number 0", ground.header(FrameKind::kSegment, 0), "x");
  add("no free slot", ground.header(FrameKind::kSegment, kMessageLanes.slots + 1), "x");
  add("number huge", ground.header(FrameKind::kSegment, kHuge), "x");
  const std::string announcement(sizeof(Announcement), '\0');
  add("too short", ground.header(FrameKind::kAnnounced), announcement.substr(1));
  add("longer than it says", ground.header(FrameKind::kAnnounced), announcement + "x");
  Announcement too_much{};
  too_much.riding_bytes =
      static_cast<std::uint32_t>(ground.messages().most_riding_bytes(kRemote, 0) + 1);
  add("more than rides along", ground.header(FrameKind::kAnnounced),
      std::string(reinterpret_cast<const char*>(&too_much), sizeof too_much) +
          std::string(too_much.riding_bytes, 'x'));
  FrameHeader taken = ground.header(FrameKind::kGranted);
  taken.extra = kTaken;
  add("read by another host", taken);
  add("number ahead", ground.header(FrameKind::kAnnounced, 1), announcement);
  add("number huge", ground.header(FrameKind::kAnnounced, kHuge), announcement);
  add("number ahead", ground.header(FrameKind::kGranted, 1));
  add("number huge", ground.header(FrameKind::kGranted, kHuge));
  add("too long", ground.header(FrameKind::kFailure),
      std::string(2 * sizeof(FailureRecord) + 1, 'x'));
  add("too short", ground.header(FrameKind::kPage), std::string(sizeof(ProcessPage) - 1, 'x'));
  add("too long", ground.header(FrameKind::kPage), std::string(sizeof(ProcessPage) + 1, 'x'));
  return all;
}

TEST(RemoteRanksTest, WhatNoRankSendsIsALossThatNamesTheRank) {
  const std::size_t cases = all_nonsense(RemoteGround()).size();
  ASSERT_GT(cases, 100u);
  for (std::size_t i = 0; i < cases; ++i) {
    RemoteGround ground;
    const Nonsense nonsense = all_nonsense(ground)[i];
    const std::string before = ground.memory_of_this_host();
    ground.send(nonsense.header, nonsense.payload);
    const std::string told =
        join("kind ", static_cast<int>(nonsense.header.kind), ": ", nonsense.what);
    ASSERT_TRUE(eventually([&] { return ground.health().why_vain(-1).has_value(); })) << told;
    const GroupHealth::Loss loss = *ground.health().why_vain(-1);
    EXPECT_EQ(loss.blame.ranks, std::vector<int>{kRemote}) << told;
    EXPECT_TRUE(contains(loss.what, "makes no sense")) << told << ": " << loss.what;
    EXPECT_TRUE(is_closed_soon(ground.connection())) << told;
    EXPECT_EQ(ground.memory_of_this_host(), before) << told;
    // For the other ranks of the host.
    EXPECT_TRUE(eventually([&] {
      return ground.segment().control(kRemote).has_left.load() ==
             static_cast<std::uint32_t>(Departure::kLost);
    })) << told;
  }
}

TEST(RemoteRanksTest, WhatARankSendsTwiceIsALoss) {
  const auto expect_loss = [](RemoteGround& ground, const FrameHeader& header,
                              const std::string& payload) {
    EXPECT_FALSE(ground.far().is_dead.load());
    ground.send(header, payload);
    EXPECT_TRUE(eventually([&] { return ground.far().is_dead.load(); }))
        << static_cast<int>(header.kind);
  };
  for (const std::uint64_t number : {kPostDepth + 2, std::size_t{2}}) {
    // The same, and an older one that had its place.
    RemoteGround ground;
    ASSERT_TRUE(ground.send(ground.header(FrameKind::kPost, kPostDepth + 2), post_text()));
    expect_loss(ground, ground.header(FrameKind::kPost, number), post_text());
  }
  for (const std::uint64_t number : {1, 2}) {
    // One that has been taken, and one that waits for its turn.
    RemoteGround ground;
    ASSERT_TRUE(ground.send(ground.header(FrameKind::kSegment, number), "x"));
    expect_loss(ground, ground.header(FrameKind::kSegment, number), "y");
  }
  {
    RemoteGround ground;
    const std::string announcement(sizeof(Announcement), '\0');
    for (std::uint64_t number = 0; number < kLaneDepth; ++number) {
      ASSERT_TRUE(ground.send(ground.header(FrameKind::kAnnounced, number), announcement));
    }
    // Nobody has heard any of them.
    expect_loss(ground, ground.header(FrameKind::kAnnounced, kLaneDepth), announcement);
  }
}

// A process that shares the network with this one, but not the group.
TEST(RemoteRanksTest, AProcessOfAnotherGroupHasNoSayInThisOne) {
  for (const FrameKind kind :
       {FrameKind::kPost, FrameKind::kEager, FrameKind::kDeposit, FrameKind::kSegment,
        FrameKind::kDeparture, FrameKind::kFailure, FrameKind::kPageRequest, FrameKind::kPage}) {
    RemoteGround ground;
    const RemoteGround::Process other = ground.connect("c");
    std::string payload;
    if (kind == FrameKind::kPage) {
      payload.resize(sizeof(ProcessPage));
    } else if (kind == FrameKind::kPost) {
      payload = post_text();
    } else if (kind == FrameKind::kFailure) {
      payload = ToldError{kRemote, {ErrorKind::kError, "x", {}}}.to_text();
    } else if (kind == FrameKind::kDeparture) {
      payload.resize(2, '\1');
    }
    ASSERT_TRUE(send_all(other.connection.get(), frame_text(ground.header(kind, 1), payload)));
    EXPECT_TRUE(eventually([&] { return other.peer->is_dead.load(); })) << static_cast<int>(kind);
    EXPECT_TRUE(contains(other.peer->loss, "makes no sense")) << other.peer->loss;
    EXPECT_FALSE(ground.far().is_dead.load());
    EXPECT_FALSE(ground.health().has_failed());
    EXPECT_FALSE(ground.health().why_vain(-1));
  }
}

TEST(RemoteRanksTest, AClockOfAnyValueOverflowsNothing) {
  RemoteGround ground;
  for (const std::uint64_t clock :
       {std::uint64_t{0}, UINT64_MAX, std::uint64_t{1} << 63, (std::uint64_t{1} << 63) - 1}) {
    ProcessPage page{};
    page.heartbeat_ns.store(static_cast<std::int64_t>(clock));
    page.pid.store(static_cast<std::int32_t>(clock >> 60) + 1);
    static_cast<void>(page.journal.begin(ground.health().fingerprint(), 1, 0, 8, "label"));
    page.journal.shift_times(static_cast<std::int64_t>(clock));
    const std::vector<std::byte> bytes = copy_of_page(page);
    ASSERT_TRUE(
        ground.send(ground.header(FrameKind::kPage, clock),
                    std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())));
    ASSERT_TRUE(eventually([&] { return ground.far().page->pid.load() == page.pid.load(); }));
    EXPECT_LT(ground.health().where(kRemote, OpKind::kAllReduce, 1).size(), 1'000u);
    EXPECT_LT(ground.health().activity(kRemote).size(), 1'000u);
    static_cast<void>(ground.health().keeper_behind(kRemote));
  }
  EXPECT_FALSE(ground.far().is_dead.load());
}

TEST(RemoteRanksTest, FramesForNoGroupAreCheckedToo) {
  for (const FrameKind kind :
       {FrameKind::kPost, FrameKind::kPageRequest, FrameKind::kHeartbeat, FrameKind::kGoodbye}) {
    RemoteGround ground;
    FrameHeader header;
    header.kind = kind;
    const bool is_of_a_process = kind == FrameKind::kHeartbeat || kind == FrameKind::kGoodbye;
    ground.send(header, is_of_a_process ? "x" : "");
    EXPECT_TRUE(eventually([&] { return ground.far().is_dead.load(); })) << static_cast<int>(kind);
    EXPECT_TRUE(contains(ground.far().loss, "makes no sense")) << ground.far().loss;
  }
}

}  // namespace
}  // namespace pydist::testing
