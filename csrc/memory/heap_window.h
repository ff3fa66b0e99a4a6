// What a process sees of the allocation heap of a process of its host, its own included: memory
// that it reads and, of others, never writes.
//
// Two steps, so that no rank offers what another one cannot read yet: a window is first opened, on
// every rank, and switched on once all ranks are known to have opened theirs. Reading is thread
// safe; opening, closing and switching on are one thread's at a time.

#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include "memory/shared_segment.h"
#include "memory/symmetric_heap.h"

namespace pydist {

class HeapWindow {
 public:
  HeapWindow() = default;
  HeapWindow(const HeapWindow&) = delete;
  HeapWindow& operator=(const HeapWindow&) = delete;

  void open(SharedSegment segment) noexcept {
    segment_ = std::move(segment);
    bytes_.store(segment_.bytes(), std::memory_order_relaxed);
    data_.store(segment_.data(), std::memory_order_release);
  }
  // Precondition: never switched on.
  void close() noexcept {
    data_.store(nullptr, std::memory_order_relaxed);
    segment_ = SharedSegment();
  }
  void switch_on() noexcept { is_on_.store(true, std::memory_order_release); }

  [[nodiscard]] bool is_on() const noexcept { return is_on_.load(std::memory_order_acquire); }

  // Where [data, data + bytes) lies, if it lies in this heap; of one's own.
  [[nodiscard]] HeapReference find(const void* data, std::size_t bytes) const noexcept {
    const std::byte* const begin = data_.load(std::memory_order_acquire);
    const std::size_t size = bytes_.load(std::memory_order_relaxed);
    const auto* const place = static_cast<const std::byte*>(data);
    if (begin == nullptr || place < begin || bytes > size ||
        static_cast<std::size_t>(place - begin) > size - bytes) {
      return 0;
    }
    return static_cast<HeapReference>(place - begin) + 1;
  }
  // Whether so many bytes from there on lie in the heap, as far as this process sees it.
  [[nodiscard]] bool has(HeapReference reference, std::uint64_t bytes) const noexcept {
    const std::byte* const begin = data_.load(std::memory_order_acquire);
    const std::size_t size = bytes_.load(std::memory_order_relaxed);
    return begin != nullptr && reference != 0 && bytes <= size && reference - 1 <= size - bytes;
  }
  // Precondition: has().
  [[nodiscard]] const std::byte* address(HeapReference reference) const noexcept {
    return data_.load(std::memory_order_relaxed) + (reference - 1);
  }

 private:
  SharedSegment segment_;
  std::atomic<const std::byte*> data_{nullptr};
  std::atomic<std::size_t> bytes_{0};
  std::atomic<bool> is_on_{false};
};

}  // namespace pydist
