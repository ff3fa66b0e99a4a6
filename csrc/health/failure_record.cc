#include "health/failure_record.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/deadline.h"

namespace pydist {
namespace {

// How long another rank may take to write a few thousand bytes.
constexpr std::chrono::milliseconds kWritingTime{100};

template <std::size_t Size>
void write(std::array<char, Size>& field, std::string_view text) noexcept {
  field[text.copy(field.data(), Size - 1)] = '\0';
}

}  // namespace

bool FailureRecord::set(ErrorKind kind, std::string_view message, int writer,
                        const Blame& blame) noexcept {
  std::uint32_t none = kNone;
  if (!state_.compare_exchange_strong(none, kFirstWriter + static_cast<std::uint32_t>(writer))) {
    return false;
  }
  kind_ = static_cast<std::uint32_t>(kind);
  reporter_ = writer;
  pid_ = blame.pid;
  rank_count_ = static_cast<std::uint32_t>(std::min(blame.ranks.size(), ranks_.size()));
  std::copy_n(blame.ranks.begin(), rank_count_, ranks_.begin());
  write(host_, blame.host);
  write(operation_, blame.operation);
  write(cause_, blame.cause);
  write(message_, message);
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
    const int silent = static_cast<int>(state - kFirstWriter);
    return make_error(ErrorKind::kError, of_silent(silent), Blame{.ranks = {silent}});
  }
  Blame blame{
      .ranks = {ranks_.begin(), ranks_.begin() + std::min<std::size_t>(rank_count_, ranks_.size())},
      .host = host_.data(),
      .pid = pid_,
      .operation = operation_.data(),
      .cause = cause_.data()};
  return make_error(static_cast<ErrorKind>(kind_), message_.data(), blame);
}

int FailureRecord::first_reporter() const noexcept {
  const std::uint32_t state = state_.load(std::memory_order_acquire);
  if (state == kNone) {
    return -1;
  }
  return state == kSet ? reporter_ : static_cast<int>(state - kFirstWriter);
}

std::exception_ptr FailureRecord::error() const {
  return error([](int) { return std::string("The group is failing."); });
}

}  // namespace pydist
