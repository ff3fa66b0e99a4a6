// How a TcpNode's connections are served: Note [Who serves the network].

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {
namespace {

// Up to so many links it is quicker to look at each than to ask which has something.
constexpr std::size_t kFewLinks = 2;

}  // namespace

bool TcpNode::poll(bool stays) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  // Who sleeps would not be woken for what is taken here.
  if (!lock || is_slept_in_.load(std::memory_order_relaxed)) {
    return false;
  }
  if (stays) {
    keep_thread_away();
  }
  is_unsent_left_.store(false, std::memory_order_relaxed);
  return try_to_serve([this] { return serve_frames(); });
}

TcpNode::Sleeper::Sleeper(TcpNode& node) : node_(node) {
  {
    const std::lock_guard lock(node_.mutex_);
    may_sleep_ = !node_.is_slept_in_.exchange(true);
    if (!may_sleep_) {
      return;
    }
    node_.keep_thread_away();
    if (!node_.watch_all()) {
      node_.is_slept_in_.store(false);
      may_sleep_ = false;
    }
  }
  // Pairs with the fence in wake_sleeper(): either the caller sees the change when it looks once
  // more, or who has made it sees the sleeper.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

TcpNode::Sleeper::~Sleeper() {
  if (may_sleep_) {
    const std::lock_guard lock(node_.mutex_);
    node_.end_sleep();
  }
}

void TcpNode::Sleeper::sleep(std::chrono::nanoseconds longest) noexcept {
  std::array<epoll_event, 2> events;
  const auto longest_ms = std::chrono::ceil<std::chrono::milliseconds>(longest).count();
  static_cast<void>(::epoll_wait(node_.sleeper_set_.get(), events.data(), events.size(),
                                 static_cast<int>(longest_ms)));
  const std::lock_guard lock(node_.mutex_);
  node_.end_sleep();
  may_sleep_ = false;
  node_.try_to_serve([this] { return node_.serve_frames(); });
}

void TcpNode::end_sleep() noexcept {
  is_slept_in_.store(false);
  sleeper_fd_.reset();
  const bool is_thread_to_serve = std::exchange(is_hand_over_due_, false);
  if (is_thread_to_serve) {
    is_polled_.store(false);
  }
  if (std::exchange(is_dozing_, false) || is_thread_to_serve) {
    wake();
  }
}

void TcpNode::wake_sleeper() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (is_slept_in_.load()) {
    sleeper_fd_.raise();
  }
}

void TcpNode::keep_thread_away() noexcept {
  polls_.fetch_add(1, std::memory_order_relaxed);
  if (!is_polled_.load(std::memory_order_relaxed)) {
    // The thread may sleep for long; from now on it is to look whether still somebody polls.
    is_polled_.store(true);
    wake();
  }
}

template <typename Serve>
bool TcpNode::try_to_serve(const Serve& serve) noexcept {
  try {
    return serve();
  } catch (const std::exception& error) {
    log_errors_of(
        [&] { log_.post(LogLevel::kError, join("Serving the network: ", error.what())); });
    return false;
  }
}

void TcpNode::end_polling() noexcept {
  if (is_unsent_left_.load(std::memory_order_relaxed) && is_unsent_left_.exchange(false)) {
    hand_over();
  }
}

void TcpNode::hand_over() noexcept {
  if (!is_polled_.load()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (is_slept_in_.load()) {
    is_hand_over_due_ = true;
  } else if (is_polled_.exchange(false)) {
    wake();
  }
}

bool TcpNode::serve_frames() {
  bool has_come = false;
  if (links_.size() <= kFewLinks || !watches_all_) {
    for (std::size_t index = 0; index < links_.size(); ++index) {
      has_come = serve(*links_[index]) || has_come;
    }
    return has_come;
  }
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(connections_.get(), events.data(), events.size(), 0);
  for (int index = 0; index < count; ++index) {
    const std::uint64_t number = events[static_cast<std::size_t>(index)].data.u64;
    has_come = serve(*links_[number - 1]) || has_come;
  }
  for (std::size_t index = 0; index < links_.size(); ++index) {
    if (links_[index]->has_to_send() || links_[index]->is_ending()) {
      has_come = serve(*links_[index]) || has_come;
    }
  }
  return has_come;
}

bool TcpNode::serve(Link& link) {
  if (link.is_lost() || link.sockets().empty()) {
    return false;
  }
  if (link.has_to_send()) {
    link.flush();
    if (link.has_to_send()) {
      is_unsent_left_.store(true, std::memory_order_relaxed);
    }
  }
  const bool has_come = link.receive([this](std::uint64_t group) -> FrameSink* {
    const auto sink = sinks_.find(group);
    return sink == sinks_.end() ? nullptr : sink->second;
  });
  if (const std::optional<std::string> why = link.end()) {
    lose(known_.at(link.peer()), *why);
  }
  return has_come;
}

}  // namespace pydist
