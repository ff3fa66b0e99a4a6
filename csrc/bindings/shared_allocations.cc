// pydist._native.enter_shared_allocations() and what belongs to it: torch's CPU allocator within
// pydist.share_allocations().
//
// While anybody is within, blocks of some size come from the heap that the other ranks of the host
// may read, where it has room, and all others from the allocator that torch had before. A block
// goes back to where it comes from, whenever and on whichever thread that is.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"
#include "memory/allocation_heap.h"

namespace pydist {
namespace {

// Smaller blocks hold nothing that others would read in place: what they hold goes ahead of an
// operation.
constexpr std::size_t kLeastBytes = std::size_t{16} << 10;

class TorchAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors and their storages refer to it.
  static TorchAllocator& get() {
    static auto& allocator = *new TorchAllocator;
    return allocator;
  }

  // Why it cannot take the place of torch's allocator; empty where it can, and then has taken it.
  // Each call that returns nothing asks for a leave().
  [[nodiscard]] std::string enter() {
    const std::lock_guard lock(mutex_);
    if (entered_ == 0) {
      c10::Allocator* const theirs =
          c10::GetCPUAllocator() == this ? usual_.load() : c10::GetCPUAllocator();
      const c10::DeleterFnPtr deleter = theirs->raw_deleter();
      // Both are used by free_block(), which torch wants to be one function for good.
      if (deleter == nullptr || (usual_deleter != nullptr && usual_deleter != deleter)) {
        return "share_allocations: another library has given torch a CPU allocator whose blocks "
               "cannot be told from others. Enter before it does so, or do without it.";
      }
      usual_deleter = deleter;
      usual_.store(theirs);
      c10::SetCPUAllocator(this);
      if (c10::GetCPUAllocator() != this) {
        return "share_allocations: another library has given torch a CPU allocator that does not "
               "let itself be replaced (its priority is above 0). Do without it.";
      }
    }
    ++entered_;
    return {};
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (--entered_ > 0) {
      return;
    }
    if (const std::shared_ptr<AllocationHeap> heap = AllocationHeap::current()) {
      AllocationHeap::set_current(nullptr);
      heap->trim();
    }
    // An allocator that somebody has installed meanwhile stays; it may hand requests on to this
    // one.
    if (c10::GetCPUAllocator() == this) {
      c10::SetCPUAllocator(usual_.load());
    }
  }

  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= kLeastBytes) {
      if (const std::shared_ptr<AllocationHeap> heap = AllocationHeap::current()) {
        if (std::byte* const block = heap->allocate(bytes)) {
          c10::profiledCPUMemoryReporter().New(block, bytes);
          return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
        }
      }
    }
    c10::DataPtr block = usual_.load()->allocate(bytes);
    if (block.get_deleter() == usual_deleter && block.get() == block.get_context()) {
      static_cast<void>(block.compare_exchange_deleter(usual_deleter, &free_block));
    }
    return block;
  }

  // Of all blocks that allocate() returns.
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  static void free_block(void* block) {
    if (const std::shared_ptr<AllocationHeap> heap = AllocationHeap::of(block)) {
      c10::profiledCPUMemoryReporter().Delete(block);
      heap->release(static_cast<std::byte*>(block));
    } else {
      usual_deleter(block);
    }
  }

  static inline std::atomic<c10::DeleterFnPtr> usual_deleter{nullptr};

  std::mutex mutex_;
  int entered_ = 0;  // guarded by mutex_
  std::atomic<c10::Allocator*> usual_{nullptr};
};

// Collective. Whether the rank allocates from a shared heap now; it then has to call leave().
bool enter(Communicator& self, std::optional<std::size_t> max_bytes) {
  TorchAllocator& allocator = TorchAllocator::get();
  const std::string refusal = allocator.enter();
  std::shared_ptr<AllocationHeap> heap;
  try {
    const ReleasedGil released;
    heap = self.share_allocations(max_bytes, refusal);
  } catch (...) {
    if (refusal.empty()) {
      allocator.leave();
    }
    throw;
  }
  if (heap != nullptr) {
    AllocationHeap::set_current(std::move(heap));
    return true;
  }
  if (refusal.empty()) {
    allocator.leave();
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
      "leave_shared_allocations", [] { TorchAllocator::get().leave(); },
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
