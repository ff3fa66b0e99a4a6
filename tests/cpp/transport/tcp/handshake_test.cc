#include "transport/tcp/handshake.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ranks.h"

namespace pydist::testing {
namespace {

// A dialer and a listener, each with what it believes to be the job's secret.
struct Meeting {
  Meeting(const JobSecret& dialers, const JobSecret& listeners)
      : dialer(meeters, dialers), listener(dialer.hello(), listeners) {}

  Meeters meeters{random_token(), random_token(), random_token()};
  DialerHandshake dialer;
  ListenerHandshake listener;
};

TEST(HandshakeTest, ThoseWhoKnowTheSecretAgree) {
  const JobSecret secret = JobSecret::random();
  const Meeting meeting(secret, secret);
  const std::optional<Meeters> heard = ListenerHandshake::read_hello(meeting.dialer.hello());
  ASSERT_TRUE(heard);
  EXPECT_EQ(heard->token, meeting.meeters.token);
  EXPECT_EQ(heard->dialer, meeting.meeters.dialer);
  EXPECT_EQ(heard->listener, meeting.meeters.listener);
  EXPECT_EQ(meeting.dialer.hello().size(), kHelloBytes);
  EXPECT_EQ(meeting.listener.challenge().size(), kChallengeBytes);
  const std::optional<std::string> answer = meeting.dialer.answer(meeting.listener.challenge());
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->size(), kAnswerBytes);
  EXPECT_TRUE(meeting.listener.is_answered_by(*answer));
}

TEST(HandshakeTest, ADialerTellsAWrongListenerNothing) {
  const Meeting meeting(JobSecret::random(), JobSecret::random());
  EXPECT_FALSE(meeting.dialer.answer(meeting.listener.challenge()));
}

TEST(HandshakeTest, AListenerRefusesAWrongDialer) {
  const JobSecret secret = JobSecret::random();
  const Meeting meeting(secret, secret);
  const DialerHandshake wrong(meeting.meeters, JobSecret::random());
  EXPECT_FALSE(wrong.answer(meeting.listener.challenge()));
  EXPECT_FALSE(meeting.listener.is_answered_by(std::string(kAnswerBytes, '0')));
  EXPECT_FALSE(meeting.listener.is_answered_by(""));
}

TEST(HandshakeTest, AnAnswerCountsInItsOwnConversationAlone) {
  const JobSecret secret = JobSecret::random();
  const Meeting first(secret, secret);
  const std::string answer = *first.dialer.answer(first.listener.challenge());
  // The same hello once more: the listener's random number is another one.
  const ListenerHandshake again(first.dialer.hello(), secret);
  EXPECT_NE(again.challenge(), first.listener.challenge());
  EXPECT_FALSE(again.is_answered_by(answer));
  // And the challenge is of no use to another hello.
  const DialerHandshake other(first.meeters, secret);
  EXPECT_NE(other.hello(), first.dialer.hello());
  EXPECT_FALSE(other.answer(first.listener.challenge()));
}

TEST(HandshakeTest, AReflectedDigestProvesNothing) {
  const JobSecret secret = JobSecret::random();
  const Meeting meeting(secret, secret);
  const std::string& challenge = meeting.listener.challenge();
  // What the listener has signed itself, sent back as the answer.
  EXPECT_FALSE(meeting.listener.is_answered_by(challenge.substr(challenge.size() - kAnswerBytes)));
  // What the dialer has signed, sent to another dialer as the challenge's digest.
  const std::string answer = *meeting.dialer.answer(challenge);
  EXPECT_FALSE(meeting.dialer.answer(challenge.substr(0, 32) + answer));
}

TEST(HandshakeTest, EveryBitOfTheConversationCounts) {
  const JobSecret secret = JobSecret::random();
  const Meeting meeting(secret, secret);
  const std::string challenge = meeting.listener.challenge();
  const std::string answer = *meeting.dialer.answer(challenge);
  for (std::size_t at = 0; at < challenge.size(); ++at) {
    std::string damaged = challenge;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    EXPECT_FALSE(meeting.dialer.answer(damaged)) << at;
  }
  for (std::size_t at = 0; at < answer.size(); ++at) {
    std::string damaged = answer;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    EXPECT_FALSE(meeting.listener.is_answered_by(damaged)) << at;
  }
  for (std::size_t at = 8; at < kHelloBytes; ++at) {
    std::string damaged = meeting.dialer.hello();
    damaged[at] = damaged[at] == '0' ? '1' : '0';
    const ListenerHandshake listener(damaged, secret);
    EXPECT_FALSE(meeting.dialer.answer(listener.challenge())) << at;
  }
}

TEST(HandshakeTest, WhatIsNoHelloIsNotRead) {
  const Meeting meeting(JobSecret::random(), JobSecret::random());
  const std::string hello = meeting.dialer.hello();
  EXPECT_TRUE(ListenerHandshake::read_hello(hello));
  for (std::size_t bytes = 0; bytes < hello.size(); ++bytes) {
    EXPECT_FALSE(ListenerHandshake::read_hello(hello.substr(0, bytes))) << bytes;
  }
  EXPECT_FALSE(ListenerHandshake::read_hello(hello + "0"));
  for (std::size_t at = 0; at < hello.size(); ++at) {
    for (const char letter : {'\0', 'g', 'A', '\xff'}) {
      std::string damaged = hello;
      damaged[at] = letter;
      if (damaged != hello) {
        EXPECT_FALSE(ListenerHandshake::read_hello(damaged)) << at << letter;
      }
    }
  }
}

TEST(HandshakeTest, TheSecretIsNeverSent) {
  const JobSecret secret = JobSecret::random();
  const Meeting meeting(secret, secret);
  const std::string all = meeting.dialer.hello() + meeting.listener.challenge() +
                          *meeting.dialer.answer(meeting.listener.challenge());
  for (std::size_t at = 0; at + 8 <= secret.key().size(); ++at) {
    EXPECT_FALSE(contains(all, secret.key().substr(at, 8))) << at;
  }
}

TEST(HandshakeTest, NoTwoConversationsAreAlike) {
  std::set<std::string> all;
  const JobSecret secret = JobSecret::random();
  for (int i = 0; i < 100; ++i) {
    const Meeting meeting(secret, secret);
    all.insert(meeting.dialer.hello());
    all.insert(meeting.listener.challenge());
  }
  EXPECT_EQ(all.size(), 200u);
}

}  // namespace
}  // namespace pydist::testing
