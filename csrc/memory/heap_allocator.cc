#include "memory/heap_allocator.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace pydist {

HeapAllocator::HeapAllocator(std::size_t bytes, std::size_t alignment)
    : bytes_(bytes), alignment_(alignment) {
  if (bytes >= alignment) {
    free_.emplace(0, bytes / alignment * alignment);
  }
}

std::size_t HeapAllocator::rounded(std::size_t bytes) const noexcept {
  return (std::max<std::size_t>(bytes, 1) + alignment_ - 1) / alignment_ * alignment_;
}

std::optional<std::size_t> HeapAllocator::allocate(std::size_t bytes) {
  if (bytes > bytes_) {
    return std::nullopt;  // before rounding it up could overflow
  }
  const std::size_t needed = rounded(bytes);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [offset, length] = *range;
    if (length < needed) {
      continue;
    }
    free_.erase(range);
    if (length > needed) {
      free_.emplace(offset + needed, length - needed);
    }
    return offset;
  }
  return std::nullopt;
}

void HeapAllocator::release(std::size_t offset, std::size_t bytes) {
  std::size_t length = rounded(bytes);
  auto next = free_.lower_bound(offset);
  PYDIST_CHECK(next == free_.end() || offset + length <= next->first);
  if (next != free_.end() && offset + length == next->first) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    PYDIST_CHECK(previous->first + previous->second <= offset);
    if (previous->first + previous->second == offset) {
      previous->second += length;
      return;
    }
  }
  free_.emplace(offset, length);
}

std::size_t HeapAllocator::free_bytes() const noexcept {
  std::size_t total = 0;
  for (const auto& [offset, length] : free_) {
    total += length;
  }
  return total;
}

}  // namespace pydist
