#include "health/failure_record.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "base/deadline.h"

namespace pydist {
namespace {

// How long another rank may take to write a few thousand bytes.
constexpr std::chrono::milliseconds kWritingTime{100};

}  // namespace

bool FailureRecord::set(ErrorKind kind, std::string_view message, int writer) noexcept {
  std::uint32_t none = kNone;
  if (!state_.compare_exchange_strong(none, kFirstWriter + static_cast<std::uint32_t>(writer))) {
    return false;
  }
  kind_ = static_cast<std::uint32_t>(kind);
  const std::size_t length = message.copy(message_.data(), message_.size() - 1);
  message_[length] = '\0';
  state_.store(kSet, std::memory_order_release);
  return true;
}

std::exception_ptr FailureRecord::error(
    const std::function<std::string(int writer)>& of_silent) const {
  std::uint32_t state = state_.load(std::memory_order_acquire);
  if (state == kNone) {
    return nullptr;
  }
  const Deadline patience = Deadline::in(kWritingTime);
  while (state >= kFirstWriter && !patience.has_passed()) {
    std::this_thread::yield();
    state = state_.load(std::memory_order_acquire);
  }
  if (state >= kFirstWriter) {
    return make_error(ErrorKind::kError, of_silent(static_cast<int>(state - kFirstWriter)));
  }
  // Other processes write there: what is damaged may have no end.
  const std::string message(message_.data(), ::strnlen(message_.data(), message_.size()));
  return make_error(static_cast<ErrorKind>(kind_), message);
}

std::exception_ptr FailureRecord::error() const {
  return error([](int) { return std::string("The group is failing."); });
}

}  // namespace pydist
