// A new connection, from the moment it is begun or accepted until both ends have proved who they
// are (handshake.h). Never blocks.
//
// For one thread at a time.

#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "memory/file_descriptor.h"
#include "transport/tcp/handshake.h"

namespace pydist {

class Conversation {
 public:
  // The secret that those who meet share; none where the listener does not expect the dialer (yet).
  using SecretOf = std::function<std::optional<JobSecret>(const Meeters& meeters)>;

  // One that has begun to connect.
  [[nodiscard]] static Conversation dial(FileDescriptor socket, const Meeters& meeters,
                                         const JobSecret& secret, Deadline deadline);
  // One that has been accepted, by the process named `listener`.
  [[nodiscard]] static Conversation accept(FileDescriptor socket, std::string listener,
                                           Deadline deadline);

  enum class State : unsigned char { kGoesOn, kAgreed, kFailed };
  // Goes on as far as it can without waiting.
  [[nodiscard]] State advance(const SecretOf& secret_of);

  [[nodiscard]] bool is_dialer() const noexcept { return dialer_.has_value(); }
  [[nodiscard]] bool waits_to_write() const noexcept { return step_ == Step::kConnecting; }
  [[nodiscard]] const Deadline& deadline() const noexcept { return deadline_; }
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }
  // Why it has failed, in words.
  [[nodiscard]] const std::string& failure() const noexcept { return failure_; }
  // Whether it has failed since the dialer was not expected: it may have come too early.
  [[nodiscard]] bool is_early() const noexcept { return is_early_; }
  // Whether it has failed since the other end has gone, which may be a rank that ends.
  [[nodiscard]] bool has_left() const noexcept { return has_left_; }
  // Who is at the other end. Precondition: it is agreed, or this is the dialer.
  [[nodiscard]] const std::string& peer() const noexcept {
    return is_dialer() ? meeters_.listener : meeters_.dialer;
  }
  [[nodiscard]] FileDescriptor release() noexcept { return std::move(socket_); }

 private:
  // What comes next.
  enum class Step : unsigned char {
    kConnecting,     // dialer
    kReadChallenge,  // dialer
    kReadWelcome,    // dialer
    kReadHello,      // listener
    kReadAnswer,     // listener
  };

  Conversation(FileDescriptor socket, Step step, Deadline deadline)
      : socket_(std::move(socket)), step_(step), deadline_(deadline) {}

  State fail(std::string why);
  // Whether `bytes` have come in all; fails where the other end has closed.
  bool read(std::size_t bytes);
  // Messages are far smaller than what the system takes at once.
  void write(const std::string& text);

  FileDescriptor socket_;
  Step step_;
  Deadline deadline_;
  Meeters meeters_;
  std::optional<DialerHandshake> dialer_;
  std::optional<ListenerHandshake> listener_;
  std::string input_;
  std::string failure_;
  bool is_early_ = false;
  bool has_left_ = false;
};

}  // namespace pydist
