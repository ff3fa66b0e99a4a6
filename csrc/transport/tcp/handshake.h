// How two processes prove to each other that they belong to one job, before anything else passes
// over a new connection: by challenge and response.
//
//   dialer    hello: a token that both have from their meeting, the names of both processes, a
//             random number
//   listener  another random number, and the digest of all of that, keyed with the job's secret
//   dialer    the digest of the same for its own role
//   listener  welcome
//
// The secret itself is never sent, and a digest is of use in this one conversation alone. A
// stranger gets one answer that it can do nothing with. Pure text; the caller moves it.

#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "memory/job_secret.h"

namespace pydist {

// Bytes of each message.
inline constexpr std::size_t kHelloBytes = 8 + 4 * 32;
inline constexpr std::size_t kChallengeBytes = 32 + 64;
inline constexpr std::size_t kAnswerBytes = 64;
inline constexpr std::size_t kWelcomeBytes = 1;
inline constexpr char kWelcome = 'w';

// Who meets whom. All are of the form of random_token().
struct Meeters {
  std::string token;  // under which both know the secret
  std::string dialer;
  std::string listener;
};

class DialerHandshake {
 public:
  DialerHandshake(const Meeters& meeters, JobSecret secret);

  [[nodiscard]] const std::string& hello() const noexcept { return hello_; }
  // What to answer; nothing where the listener does not know the secret.
  [[nodiscard]] std::optional<std::string> answer(std::string_view challenge) const;

 private:
  JobSecret secret_;
  std::string hello_;
};

class ListenerHandshake {
 public:
  // Who says hello; nothing where it is no hello.
  [[nodiscard]] static std::optional<Meeters> read_hello(std::string_view hello);

  // `secret` is that of the hello's token.
  ListenerHandshake(std::string_view hello, JobSecret secret);

  [[nodiscard]] const std::string& challenge() const noexcept { return challenge_; }
  [[nodiscard]] bool is_answered_by(std::string_view answer) const;

 private:
  JobSecret secret_;
  std::string conversation_;
  std::string challenge_;
};

}  // namespace pydist
