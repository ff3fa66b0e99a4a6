// pydist._native.enter_shared_allocations() and what belongs to it: torch's CPU allocator within
// pydist.share_allocations(), see c10d/cpu_allocator.h.

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "c10d/cpu_allocator.h"
#include "memory/allocation_heap.h"

namespace pydist {
namespace {

// How often the process is within. The heap is in use until it has left as often.
class Entries {
 public:
  // Why it can't enter; empty where it has.
  [[nodiscard]] std::string enter() {
    const std::string why = CpuAllocator::get().install();
    if (!why.empty()) {
      return "share_allocations: " + why;
    }
    const std::lock_guard lock(mutex_);
    ++count_;
    return {};
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (--count_ == 0) {
      if (const std::shared_ptr<AllocationHeap> heap = AllocationHeap::current()) {
        AllocationHeap::set_current(nullptr);
        heap->trim();
      }
    }
  }

 private:
  std::mutex mutex_;
  int count_ = 0;  // guarded by mutex_
};

Entries& entries() {
  static auto& entries = *new Entries;
  return entries;
}

// Collective. Whether the rank allocates from a shared heap now; it then has to call leave().
bool enter(Communicator& self, std::optional<std::size_t> max_bytes) {
  const std::string refusal = entries().enter();
  std::shared_ptr<AllocationHeap> heap;
  try {
    const ReleasedGil released;
    heap = self.share_allocations(max_bytes, refusal);
  } catch (...) {
    if (refusal.empty()) {
      entries().leave();
    }
    throw;
  }
  if (heap != nullptr) {
    AllocationHeap::set_current(std::move(heap));
    return true;
  }
  if (refusal.empty()) {
    entries().leave();
  }
  return false;
}

}  // namespace

void bind_shared_allocations(py::module_& module) {
  module.def("enter_shared_allocations", &enter, py::arg("communicator"), py::arg("max_bytes"),
             "Lets the ranks of each host read what torch allocates on the CPU from now on; all "
             "ranks of the group call. False where that cannot be, and nothing changes; otherwise "
             "leave_shared_allocations() has to follow.");
  module.def(
      "leave_shared_allocations", [] { entries().leave(); },
      "Ends what enter_shared_allocations() has begun; what has been allocated stays.");
  module.def(
      "shared_allocation_bytes",
      [] {
        const std::shared_ptr<AllocationHeap> heap = AllocationHeap::current();
        return heap == nullptr ? std::pair<std::size_t, std::size_t>()
                               : std::pair(heap->used_bytes(), heap->reserved_bytes());
      },
      "Bytes in use of the heap that torch allocates from at present, and bytes that it has "
      "reserved.");
}

}  // namespace pydist
