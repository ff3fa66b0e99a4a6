#include "health/failure_record.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/deadline.h"

namespace pydist {
namespace {

// How long another rank may take to write a few thousand bytes.
constexpr std::chrono::milliseconds kWritingTime{100};

// Cut to fit, between two characters of UTF-8.
template <std::size_t Size>
void write(std::array<char, Size>& field, std::string_view text) noexcept {
  std::size_t length = std::min(text.size(), Size - 1);
  const auto is_inside = [&] {
    return (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U;
  };
  while (length != 0 && length < text.size() && is_inside()) {
    --length;
  }
  field[text.copy(field.data(), length)] = '\0';
}

// Ends with the field, whatever a rank has written there.
template <std::size_t Size>
std::string read(const std::array<char, Size>& field) {
  return {field.data(), ::strnlen(field.data(), Size)};
}

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
  write(host_, blame.host);
  write(operation_, blame.operation);
  write(cause_, blame.cause);
  write(message_, message);
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
      .host = read(host_),
      .pid = pid_,
      .operation = read(operation_),
      .cause = read(cause_)};
  return make_error(static_cast<ErrorKind>(kind_), read(message_), blame);
}

std::exception_ptr FailureRecord::error() const {
  return error([](int writer) {
    return ErrorDescription{ErrorKind::kError, "The group is failing.", {.ranks = {writer}}};
  });
}

}  // namespace pydist
