// The first error of a group, which stays: later ones are of its making.
//
// Whoever meets an error first writes it, everybody reads it. A native group keeps the record in
// the shared memory of its ranks, where zeros stand for a sound group; any other group keeps its
// own in the process. A group, and with it the record, is of one generation of the job. Thread
// safe, across processes too.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pydist {

class FailureRecord {
 public:
  // Cheap. Sequentially consistent, as set() is: a thread that first announces its work and then
  // asks either finds the error, or the thread that set the error has seen the announcement.
  [[nodiscard]] bool is_set() const noexcept { return state_.load() != kNone; }

  // Records the error, cut to fit, unless another one came first; returns whether it did. `writer`
  // is the rank that records.
  bool set(ErrorKind kind, std::string_view message, int writer, const Blame& blame = {}) noexcept;

  // Null while the group is sound. Each call makes an exception of its own, since one must not be
  // shared by threads. `of_silent` words the error where a rank has begun to write its reason and
  // does not come to the end of it: it has died or was stopped.
  [[nodiscard]] std::exception_ptr error(
      const std::function<ErrorDescription(int writer)>& of_silent) const;
  // The same for a record whose writers are all threads of this process: none of them dies halfway.
  [[nodiscard]] std::exception_ptr error() const;

 private:
  // kFirstWriter + r: rank r is writing.
  enum State : std::uint32_t { kNone = 0, kSet = 1, kFirstWriter = 2 };

  alignas(64) std::atomic<std::uint32_t> state_{kNone};
  std::uint32_t kind_ = 0;
  std::int32_t pid_ = 0;
  std::uint32_t rank_count_ = 0;
  std::array<std::int32_t, 60> ranks_{};  // the first of them
  std::array<char, 256> host_{};
  std::array<char, 512> operation_{};
  std::array<char, 512> cause_{};
  std::array<char, 2560> message_{};  // fills a page together with the fields above
};

}  // namespace pydist
