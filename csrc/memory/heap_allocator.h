// Which ranges of a heap are free: the pure part of the symmetric heap, with no memory in it.
//
// First fit over address-ordered free ranges, merged when they touch. Deterministic.

#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace pydist {

class HeapAllocator {
 public:
  // Manages [0, bytes), all free. Sizes and offsets are multiples of `alignment`.
  explicit HeapAllocator(std::size_t bytes, std::size_t alignment = 256);

  // The offset of a free range of at least `bytes`; nothing where none is long enough.
  [[nodiscard]] std::optional<std::size_t> allocate(std::size_t bytes);

  // Gives back what allocate(bytes) returned.
  void release(std::size_t offset, std::size_t bytes);

  [[nodiscard]] std::size_t free_bytes() const noexcept;

  // Calls `function(offset, bytes)` for each free range, in order; it must not change anything
  // here.
  template <typename Function>
  void for_each_free(const Function& function) const {
    for (const auto& [offset, bytes] : free_) {
      function(offset, bytes);
    }
  }

 private:
  [[nodiscard]] std::size_t rounded(std::size_t bytes) const noexcept;

  std::size_t bytes_;
  std::size_t alignment_;
  std::map<std::size_t, std::size_t> free_;  // offset to length
};

}  // namespace pydist
