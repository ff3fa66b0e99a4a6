// How a TcpNode comes to its connections: whom it dials, and whom it lets in.

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {
namespace {

// How long a conversation may take: a stranger that says nothing is dropped then.
constexpr std::chrono::seconds kTalkPatience{10};
// Strangers may not take all descriptors.
constexpr std::size_t kMostTalks = 128;
constexpr std::chrono::seconds kBetweenWarnings{10};
// One flow between two machines may be limited, by their network or by the core that serves it.
constexpr std::size_t kSocketsBetweenMachines = 2;

std::chrono::milliseconds pause_after(std::size_t failures) {
  return std::chrono::milliseconds(std::min<std::size_t>(200, 5 * failures));
}

}  // namespace

bool TcpNode::is_here(const Known& known) const {
  return !card_.machine.empty() && known.card.machine == card_.machine;
}

std::size_t TcpNode::sockets_to(const Known& known) const {
  // Several interfaces are used together, so each takes one.
  const std::size_t least = std::max<std::size_t>(1, settings_.interfaces.size());
  return settings_.sockets.value_or(std::max(least, is_here(known) ? 1 : kSocketsBetweenMachines));
}

bool TcpNode::is_to_be_dialled(const Known& known) const {
  const Link& link = *known.link;
  return known.dialled < sockets_to(known) && !link.is_lost() && !known.secrets.empty() &&
         (!known.deadline.has_passed() || (!link.is_up() && link.has_to_send()));
}

void TcpNode::serve_meetings() {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(meetings_.get(), events.data(), events.size(), 0);
  for (int index = 0; index < count; ++index) {
    const std::uint64_t event = events[static_cast<std::size_t>(index)].data.u64;
    if (event == kWakeEvent) {
      wake_fd_.reset();
    } else if (event == kListenerEvent) {
      accept_all();
    } else if (const auto talk = talks_.find(event); talk != talks_.end()) {
      advance(talk);
    }
  }
}

void TcpNode::accept_all() {
  while (true) {
    FileDescriptor socket = accept_one(listener_.get());
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        pause_listening();
      }
      return;
    }
    if (talks_.size() >= kMostTalks) {
      // The oldest has had the most time to prove who it is.
      const auto oldest = std::find_if(talks_.begin(), talks_.end(), [](const auto& talk) {
        return !talk.second.conversation.is_dialer();
      });
      if (oldest == talks_.end()) {
        continue;
      }
      ++strangers_;
      // A child that was forked may keep the connection open, and the system would go on to tell.
      static_cast<void>(
          ::epoll_ctl(meetings_.get(), EPOLL_CTL_DEL, oldest->second.conversation.fd(), nullptr));
      talks_.erase(oldest);
    }
    begin_talk(
        {Conversation::accept(std::move(socket), card_.name, Deadline::in(kTalkPatience)), ""});
  }
}

void TcpNode::pause_listening() noexcept {
  // Whoever waits there would be told of again and again.
  static_cast<void>(::epoll_ctl(meetings_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr));
  is_listening_ = false;
}

void TcpNode::begin_talk(Talk talk) {
  const Conversation& conversation = talk.conversation;
  watch_in(meetings_.get(), EPOLL_CTL_ADD, conversation.fd(),
           conversation.waits_to_write() ? EPOLLOUT : EPOLLIN, ++last_talk_);
  talks_.emplace(last_talk_, std::move(talk));
}

void TcpNode::dial_where_due() {
  for (auto& [name, known] : known_) {
    while (is_to_be_dialled(known) && known.next_try.has_passed()) {
      dial(known);
    }
  }
}

void TcpNode::dial(Known& known) {
  const std::string& address =
      known.card.addresses[known.next_address++ % known.card.addresses.size()];
  const auto& [token, secret] = *known.secrets.begin();
  ++known.dialled;
  try {
    begin_talk({Conversation::dial(begin_connect(SocketAddress::from_text(address)),
                                   {token, card_.name, known.card.name}, secret,
                                   Deadline::in(kTalkPatience)),
                address});
  } catch (const Error& error) {
    --known.dialled;
    known.hindrance = error.what();
    known.next_try = Deadline::in(pause_after(++known.failures));
  }
}

void TcpNode::advance(Talks::iterator talk) {
  const auto secret_of = [this](const Meeters& meeters) -> std::optional<JobSecret> {
    const auto expected = expected_.find(meeters.token);
    const auto known = known_.find(meeters.dialer);
    const bool is_expected =
        expected != expected_.end() && known != known_.end() && !known->second.link->is_lost();
    return is_expected ? std::optional(expected->second) : std::nullopt;
  };
  Conversation& conversation = talk->second.conversation;
  const bool has_connected = conversation.waits_to_write();
  const Conversation::State state = conversation.advance(secret_of);
  if (state != Conversation::State::kGoesOn) {
    end_talk(talk, state);
  } else if (has_connected) {
    watch_in(meetings_.get(), EPOLL_CTL_MOD, conversation.fd(), EPOLLIN, talk->first);
  }
}

void TcpNode::drop_silent_talks() {
  for (auto talk = talks_.begin(); talk != talks_.end();) {
    const auto each = talk++;
    if (each->second.conversation.deadline().has_passed()) {
      end_talk(each, Conversation::State::kGoesOn);
    }
  }
}

void TcpNode::end_talk(Talks::iterator talk, Conversation::State state) {
  Talk ended = std::move(talk->second);
  talks_.erase(talk);
  Conversation& conversation = ended.conversation;
  static_cast<void>(::epoll_ctl(meetings_.get(), EPOLL_CTL_DEL, conversation.fd(), nullptr));
  const std::string why =
      state == Conversation::State::kGoesOn ? "it does not answer" : conversation.failure();
  if (state == Conversation::State::kAgreed) {
    Known& known = known_.at(conversation.peer());
    if (known.link->is_lost()) {
      return;
    }
    known.failures = 0;
    known.hindrance.clear();
    if (is_here(known)) {
      end_pacing(conversation.fd());
    }
    known.link->add(conversation.release());
    if (!watch_all()) {
      wake_sleeper();
    }
    return;
  }
  if (conversation.is_dialer()) {
    Known& known = known_.at(conversation.peer());
    --known.dialled;
    known.hindrance = join("connecting to ", ended.address, ": ", why);
    known.next_try = Deadline::in(pause_after(++known.failures));
  } else if (!conversation.is_early() && !conversation.has_left()) {
    warn_of_stranger(peer_text(conversation.fd()), why);
  }
}

void TcpNode::warn_of_stranger(const std::string& who, const std::string& why) {
  ++strangers_;
  if (next_warning_.has_passed()) {
    next_warning_ = Deadline::in(kBetweenWarnings);
    log_.post(LogLevel::kWarning,
              join("Somebody at ", who, " has connected to this rank and was dropped: ", why, ". ",
                   strangers_, " of that kind so far."));
  }
}

}  // namespace pydist
