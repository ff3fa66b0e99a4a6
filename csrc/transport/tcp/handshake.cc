#include "transport/tcp/handshake.h"

#include <utility>

#include "base/error.h"

namespace pydist {
namespace {

// The last byte grows with the form of the frames.
constexpr std::string_view kMagic{"pydist\0\1", 8};
constexpr std::size_t kNameBytes = 32;
constexpr std::string_view kHexadecimal = "0123456789abcdef";

std::string said_by(std::string_view role, std::string_view conversation) {
  return join("connection, ", role, ": ", conversation);
}

}  // namespace

DialerHandshake::DialerHandshake(const Meeters& meeters, JobSecret secret)
    : secret_(std::move(secret)),
      hello_(join(kMagic, meeters.token, meeters.dialer, meeters.listener, random_token())) {
  PYDIST_CHECK(hello_.size() == kHelloBytes);
}

std::optional<std::string> DialerHandshake::answer(std::string_view challenge) const {
  PYDIST_CHECK(challenge.size() == kChallengeBytes);
  const std::string conversation = join(hello_, challenge.substr(0, kNameBytes));
  if (!secret_.has_signed(said_by("listener", conversation), challenge.substr(kNameBytes))) {
    return std::nullopt;
  }
  return secret_.sign(said_by("dialer", conversation));
}

std::optional<Meeters> ListenerHandshake::read_hello(std::string_view hello) {
  if (hello.size() != kHelloBytes || hello.substr(0, kMagic.size()) != kMagic ||
      hello.find_first_not_of(kHexadecimal, kMagic.size()) != std::string_view::npos) {
    return std::nullopt;
  }
  const auto name = [hello](std::size_t index) {
    return std::string(hello.substr(kMagic.size() + index * kNameBytes, kNameBytes));
  };
  return Meeters{name(0), name(1), name(2)};
}

ListenerHandshake::ListenerHandshake(std::string_view hello, JobSecret secret)
    : secret_(std::move(secret)) {
  const std::string own = random_token();
  conversation_ = join(hello, own);
  challenge_ = own + secret_.sign(said_by("listener", conversation_));
}

bool ListenerHandshake::is_answered_by(std::string_view answer) const {
  return secret_.has_signed(said_by("dialer", conversation_), answer);
}

}  // namespace pydist
