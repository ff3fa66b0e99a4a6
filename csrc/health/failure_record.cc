#include "health/failure_record.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/deadline.h"
#include "health/text_field.h"

namespace pydist {
namespace {

// How long another rank may take to write a few thousand bytes.
constexpr std::chrono::milliseconds kWritingTime{100};

}  // namespace

bool FailureRecord::set(ErrorKind kind, std::string_view message, int writer,
                        const Blame& blame) noexcept {
  std::uint32_t none = kNone;
  if (!state_.compare_exchange_strong(none, kFirstWriter + static_cast<std::uint32_t>(writer))) {
    return false;
  }
  kind_ = static_cast<std::uint32_t>(kind);
  pid_ = blame.pid;
  rank_count_ = static_cast<std::uint32_t>(std::min(blame.ranks.size(), ranks_.size()));
  std::copy_n(blame.ranks.begin(), rank_count_, ranks_.begin());
  write_text(host_, blame.host);
  write_text(operation_, blame.operation);
  write_text(cause_, blame.cause);
  write_text(message_, message);
  state_.store(kSet, std::memory_order_release);
  return true;
}

std::exception_ptr FailureRecord::error(
    const std::function<ErrorDescription(int writer)>& of_silent) const {
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
    const ErrorDescription silent = of_silent(static_cast<int>(state - kFirstWriter));
    return make_error(silent.kind, silent.message, silent.blame);
  }
  Blame blame{
      .ranks = {ranks_.begin(), ranks_.begin() + std::min<std::size_t>(rank_count_, ranks_.size())},
      .host = read_text(host_),
      .pid = pid_,
      .operation = read_text(operation_),
      .cause = read_text(cause_)};
  return make_error(static_cast<ErrorKind>(kind_), read_text(message_), blame);
}

std::exception_ptr FailureRecord::error() const {
  return error([](int writer) {
    return ErrorDescription{ErrorKind::kError, "The group is failing.", {.ranks = {writer}}};
  });
}

}  // namespace pydist
