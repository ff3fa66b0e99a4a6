#include "transport/tcp/conversation.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

using State = Conversation::State;

const Meeters& who_meets() {
  static const Meeters meeters{random_token(), random_token(), random_token()};
  return meeters;
}

Deadline long_from_now() { return Deadline::in(std::chrono::seconds(20)); }

// A listener and what it answers to, by the test.
struct Listener {
  State advance() {
    return conversation.advance([this](const Meeters& meeters) {
      asked = meeters;
      return expected;
    });
  }
  // Says something, and lets the listener go on.
  State say(std::string_view text) {
    EXPECT_TRUE(send_all(pair.test.get(), text));
    return advance();
  }
  std::string heard() { return receive_some(pair.test.get()); }

  JobSecret secret = JobSecret::random();
  std::optional<JobSecret> expected = secret;
  std::optional<Meeters> asked;
  SocketPair pair;
  Conversation conversation =
      Conversation::accept(std::move(pair.engine), who_meets().listener, long_from_now());
};

struct Dialer {
  State advance() {
    return conversation.advance([](const Meeters&) { return std::optional<JobSecret>(); });
  }

  JobSecret secret = JobSecret::random();
  SocketPair pair;
  Conversation conversation =
      Conversation::dial(std::move(pair.engine), who_meets(), secret, long_from_now());
};

TEST(ConversationTest, BothEndsAgree) {
  SocketPair pair;
  const JobSecret secret = JobSecret::random();
  Conversation dialer =
      Conversation::dial(std::move(pair.engine), who_meets(), secret, long_from_now());
  Conversation listener =
      Conversation::accept(std::move(pair.test), who_meets().listener, long_from_now());
  const auto secret_of = [&](const Meeters&) { return std::optional(secret); };
  EXPECT_TRUE(dialer.waits_to_write());
  EXPECT_EQ(listener.advance(secret_of), State::kGoesOn);
  EXPECT_EQ(dialer.advance(secret_of), State::kGoesOn);
  EXPECT_FALSE(dialer.waits_to_write());
  EXPECT_EQ(dialer.advance(secret_of), State::kGoesOn);
  EXPECT_EQ(listener.advance(secret_of), State::kGoesOn);
  EXPECT_EQ(dialer.advance(secret_of), State::kGoesOn);
  EXPECT_EQ(listener.advance(secret_of), State::kAgreed);
  // What follows the welcome is left for whoever reads frames.
  const FileDescriptor listeners = listener.release();
  ASSERT_TRUE(send_all(listeners.get(), "a frame"));
  EXPECT_EQ(dialer.advance(secret_of), State::kAgreed);
  EXPECT_EQ(dialer.peer(), who_meets().listener);
  EXPECT_EQ(listener.peer(), who_meets().dialer);
  const FileDescriptor dialers = dialer.release();
  EXPECT_EQ(receive_some(dialers.get()), "a frame");
}

TEST(ConversationTest, AnHonestDialerIsWelcomeInAnySplit) {
  for (const std::size_t piece : {1, 7, 63, 1'000}) {
    Listener listener;
    const DialerHandshake handshake(who_meets(), listener.secret);
    State state = State::kGoesOn;
    const auto say_in_pieces = [&](std::string_view text) {
      for (std::size_t at = 0; at < text.size(); at += piece) {
        ASSERT_EQ(state, State::kGoesOn);
        state = listener.say(text.substr(at, piece));
      }
    };
    say_in_pieces(handshake.hello());
    const std::string challenge = listener.heard();
    ASSERT_EQ(challenge.size(), kChallengeBytes);
    EXPECT_EQ(listener.asked->token, who_meets().token);
    say_in_pieces(*handshake.answer(challenge));
    EXPECT_EQ(state, State::kAgreed);
    EXPECT_EQ(listener.heard(), std::string(1, kWelcome));
  }
}

TEST(ConversationTest, WhoDoesNotKnowTheSecretIsRefused) {
  Listener listener;
  const DialerHandshake wrong(who_meets(), JobSecret::random());
  EXPECT_EQ(listener.say(wrong.hello()), State::kGoesOn);
  const std::string challenge = listener.heard();
  EXPECT_EQ(listener.say(std::string(kAnswerBytes, 'a')), State::kFailed);
  EXPECT_EQ(listener.heard(), "");
  EXPECT_TRUE(contains(listener.conversation.failure(), "does not know the job's secret"));
  EXPECT_FALSE(listener.conversation.is_early());
  EXPECT_FALSE(contains(challenge, listener.secret.key()));
}

TEST(ConversationTest, ARecordedConversationIsOfNoUse) {
  Listener first;
  const DialerHandshake honest(who_meets(), first.secret);
  first.say(honest.hello());
  const std::string answer = *honest.answer(first.heard());
  ASSERT_EQ(first.say(answer), State::kAgreed);

  Listener second;
  second.secret = first.secret;
  second.expected = first.secret;
  EXPECT_EQ(second.say(honest.hello()), State::kGoesOn);
  EXPECT_EQ(second.say(answer), State::kFailed);
}

TEST(ConversationTest, AListenerHearsItsOwnChallengeBack) {
  Listener listener;
  const DialerHandshake handshake(who_meets(), listener.secret);
  listener.say(handshake.hello());
  const std::string challenge = listener.heard();
  EXPECT_EQ(listener.say(challenge.substr(challenge.size() - kAnswerBytes)), State::kFailed);
}

TEST(ConversationTest, WhoIsNotExpectedMayHaveComeTooEarly) {
  Listener listener;
  listener.expected = std::nullopt;
  const DialerHandshake handshake(who_meets(), listener.secret);
  EXPECT_EQ(listener.say(handshake.hello()), State::kFailed);
  EXPECT_TRUE(listener.conversation.is_early());
  EXPECT_EQ(listener.heard(), "");
}

TEST(ConversationTest, WhoMeansAnotherListenerIsRefused) {
  Listener listener;
  Meeters meeters = who_meets();
  meeters.listener = random_token();
  const DialerHandshake handshake(meeters, listener.secret);
  EXPECT_EQ(listener.say(handshake.hello()), State::kFailed);
  EXPECT_FALSE(listener.asked);
  EXPECT_FALSE(listener.conversation.is_early());
  EXPECT_EQ(listener.heard(), "");
}

TEST(ConversationTest, AHelloThatIsCutIsWaitedForAndItsEndIsNoticed) {
  const std::string hello = DialerHandshake(who_meets(), JobSecret::random()).hello();
  for (std::size_t bytes = 0; bytes < hello.size(); ++bytes) {
    Listener listener;
    ASSERT_EQ(listener.say(hello.substr(0, bytes)), State::kGoesOn) << bytes;
    ASSERT_EQ(listener.advance(), State::kGoesOn) << bytes;
    ::shutdown(listener.pair.test.get(), SHUT_WR);
    ASSERT_EQ(listener.advance(), State::kFailed) << bytes;
    EXPECT_TRUE(contains(listener.conversation.failure(), "closed the connection"));
    EXPECT_EQ(listener.heard(), "");
  }
}

TEST(ConversationTest, AStrangerGetsNoAnswerToGarbage) {
  for (const std::string& garbage :
       {std::string(kHelloBytes, '\0'), std::string(kHelloBytes, 'a'),
        "GET / HTTP/1.1\r\n\r\n" + std::string(kHelloBytes, 'x'), std::string(4'096, '\xff')}) {
    Listener listener;
    EXPECT_EQ(listener.say(garbage), State::kFailed);
    EXPECT_TRUE(contains(listener.conversation.failure(), "something else"));
    EXPECT_EQ(listener.heard(), "");
  }
}

TEST(ConversationTest, ADialerTellsAWrongListenerNothingButItsHello) {
  Dialer dialer;
  EXPECT_EQ(dialer.advance(), State::kGoesOn);
  const std::string hello = receive_some(dialer.pair.test.get());
  ASSERT_EQ(hello.size(), kHelloBytes);
  const ListenerHandshake wrong(hello, JobSecret::random());
  ASSERT_TRUE(send_all(dialer.pair.test.get(), wrong.challenge()));
  EXPECT_EQ(dialer.advance(), State::kFailed);
  EXPECT_TRUE(contains(dialer.conversation.failure(), "does not know the job's secret"));
  EXPECT_EQ(receive_some(dialer.pair.test.get()), "");
  EXPECT_FALSE(contains(hello, dialer.secret.key()));
}

TEST(ConversationTest, ADialerTakesNoOtherWelcome) {
  Dialer dialer;
  static_cast<void>(dialer.advance());
  const ListenerHandshake listener(receive_some(dialer.pair.test.get()), dialer.secret);
  ASSERT_TRUE(send_all(dialer.pair.test.get(), listener.challenge()));
  EXPECT_EQ(dialer.advance(), State::kGoesOn);
  EXPECT_TRUE(listener.is_answered_by(receive_some(dialer.pair.test.get())));
  ASSERT_TRUE(send_all(dialer.pair.test.get(), "x"));
  EXPECT_EQ(dialer.advance(), State::kFailed);
}

TEST(ConversationTest, ADialerNoticesThatTheListenerIsGone) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kChallengeBytes - 1}) {
    Dialer dialer;
    EXPECT_EQ(dialer.advance(), State::kGoesOn);
    ASSERT_TRUE(send_all(dialer.pair.test.get(), std::string(bytes, 'a')));
    EXPECT_EQ(dialer.advance(), State::kGoesOn);
    ::shutdown(dialer.pair.test.get(), SHUT_WR);
    EXPECT_EQ(dialer.advance(), State::kFailed);
    EXPECT_TRUE(contains(dialer.conversation.failure(), "closed the connection"));
  }
}

}  // namespace
}  // namespace pydist::testing
