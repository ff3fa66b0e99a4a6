// The allocation heaps of this process, and what a fork() does with them: see Note [Heaps and
// forks]. Thread safe.
//
// For allocation_heap.cc alone.

#pragma once

#include <memory>

#include "memory/allocation_heap.h"

namespace pydist {

class HeapForks {
 public:
  static void add(AllocationHeap& heap);
  static void remove(AllocationHeap& heap) noexcept;
  // As AllocationHeap::of().
  [[nodiscard]] static std::shared_ptr<AllocationHeap> find(const void* address) noexcept;
  // As AllocationHeap::current() and set_current().
  [[nodiscard]] static std::shared_ptr<AllocationHeap> current() noexcept;
  static void set_current(std::shared_ptr<AllocationHeap> heap) noexcept;

 private:
  struct State;
  [[nodiscard]] static State& state();
  static void before() noexcept;
  static void after_in_parent() noexcept;
  static void after_in_child() noexcept;
};

}  // namespace pydist
