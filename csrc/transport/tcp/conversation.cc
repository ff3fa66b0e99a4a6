#include "transport/tcp/conversation.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "transport/tcp/sockets.h"

namespace pydist {

Conversation Conversation::dial(FileDescriptor socket, const Meeters& meeters,
                                const JobSecret& secret, Deadline deadline) {
  Conversation result(std::move(socket), Step::kConnecting, deadline);
  result.meeters_ = meeters;
  result.dialer_.emplace(meeters, secret);
  return result;
}

Conversation Conversation::accept(FileDescriptor socket, std::string listener, Deadline deadline) {
  Conversation result(std::move(socket), Step::kReadHello, deadline);
  result.meeters_.listener = std::move(listener);
  return result;
}

Conversation::State Conversation::fail(std::string why) {
  failure_ = std::move(why);
  return State::kFailed;
}

bool Conversation::read(std::size_t bytes) {
  while (input_.size() < bytes) {
    char piece[kHelloBytes];
    // No further than the message: what follows are frames.
    const ssize_t count =
        ::recv(socket_.get(), piece, std::min(sizeof piece, bytes - input_.size()), MSG_DONTWAIT);
    if (count > 0) {
      input_.append(piece, static_cast<std::size_t>(count));
    } else if (count < 0 && errno == EINTR) {
      continue;
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return false;
    } else {
      has_left_ = count == 0 || errno == ECONNRESET;
      failure_ = has_left_ ? "it has closed the connection" : std::strerror(errno);
      return false;
    }
  }
  return true;
}

void Conversation::write(const std::string& text) {
  const ssize_t count =
      ::send(socket_.get(), text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count != static_cast<ssize_t>(text.size())) {
    failure_ = count < 0 ? std::strerror(errno) : "it takes no data";
  }
  input_.clear();
}

Conversation::State Conversation::advance(const SecretOf& secret_of) {
  while (failure_.empty()) {
    switch (step_) {
      case Step::kConnecting:
        if (const int error = error_of_socket(socket_.get()); error != 0) {
          return fail(std::strerror(error));
        }
        write(dialer_->hello());
        step_ = Step::kReadChallenge;
        continue;
      case Step::kReadChallenge:
        if (read(kChallengeBytes)) {
          const std::optional<std::string> answer = dialer_->answer(input_);
          if (!answer) {
            return fail("it does not know the job's secret");
          }
          write(*answer);
          step_ = Step::kReadWelcome;
          continue;
        }
        break;
      case Step::kReadWelcome:
        if (read(kWelcomeBytes)) {
          return input_[0] == kWelcome ? State::kAgreed : fail("it answers in another language");
        }
        break;
      case Step::kReadHello:
        if (read(kHelloBytes)) {
          std::optional<Meeters> meeters = ListenerHandshake::read_hello(input_);
          if (!meeters || meeters->listener != meeters_.listener) {
            return fail("it says something else than a rank of this job would");
          }
          const std::optional<JobSecret> secret = secret_of(*meeters);
          if (!secret) {
            is_early_ = true;
            return fail("this process does not expect it");
          }
          meeters_ = *std::move(meeters);
          listener_.emplace(std::string(input_), *secret);
          write(listener_->challenge());
          step_ = Step::kReadAnswer;
          continue;
        }
        break;
      case Step::kReadAnswer:
        if (read(kAnswerBytes)) {
          if (!listener_->is_answered_by(input_)) {
            return fail("it does not know the job's secret");
          }
          write(std::string(1, kWelcome));
          return failure_.empty() ? State::kAgreed : State::kFailed;
        }
        break;
    }
    return failure_.empty() ? State::kGoesOn : State::kFailed;
  }
  return State::kFailed;
}

}  // namespace pydist
