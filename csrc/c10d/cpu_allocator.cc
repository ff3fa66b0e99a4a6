#include "c10d/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "memory/allocation_heap.h"

namespace pydist {
namespace {

// Smaller blocks hold nothing that others would read in place: what they hold goes ahead of an
// operation.
constexpr std::size_t kLeastSharedBytes = std::size_t{16} << 10;

using Sources = std::vector<std::shared_ptr<BlockSource>>;

// Null where there are none. No object with a destructor: others of a thread that ends may still
// allocate.
constinit thread_local Sources* sources_of_thread = nullptr;
constinit thread_local int own_blocks_of_thread = 0;

void forget_those_that_are_over() {
  if (sources_of_thread == nullptr) {
    return;
  }
  std::erase_if(*sources_of_thread, [](const auto& each) { return each->is_over(); });
  if (sources_of_thread->empty()) {
    delete std::exchange(sources_of_thread, nullptr);
  }
}

}  // namespace

CpuAllocator::OwnBlocks::OwnBlocks() noexcept { ++own_blocks_of_thread; }
CpuAllocator::OwnBlocks::~OwnBlocks() { --own_blocks_of_thread; }

// A thread that holds a lock does not exist in a forked child.
CpuAllocator::CpuAllocator() {
  const auto unlock = [] {
    get().offered_mutex_.unlock();
    get().mutex_.unlock();
  };
  const auto lock = [] {
    get().mutex_.lock();
    get().offered_mutex_.lock();
  };
  ::pthread_atfork(lock, unlock, unlock);
}

CpuAllocator& CpuAllocator::get() {
  static auto& allocator = *new CpuAllocator;
  return allocator;
}

std::string CpuAllocator::install() {
  const std::lock_guard lock(mutex_);
  c10::Allocator* const theirs = c10::GetCPUAllocator();
  if (theirs == this) {
    return {};
  }
  const c10::DeleterFnPtr deleter = theirs->raw_deleter();
  // Both are used by free_block(), which torch wants to be one function for good.
  if (deleter == nullptr || (usual_deleter != nullptr && usual_deleter != deleter)) {
    return "another library has given torch a CPU allocator whose blocks cannot be told from "
           "others. Enter before it does so, or do without it.";
  }
  usual_deleter = deleter;
  usual_.store(theirs);
  c10::SetCPUAllocator(this);
  if (c10::GetCPUAllocator() != this) {
    return "another library has given torch a CPU allocator that does not let itself be replaced "
           "(its priority is above 0). Do without it.";
  }
  return {};
}

void CpuAllocator::ask(std::shared_ptr<BlockSource> source) {
  forget_those_that_are_over();
  if (sources_of_thread == nullptr) {
    sources_of_thread = new Sources;
  }
  sources_of_thread->insert(sources_of_thread->begin(), std::move(source));
}

c10::DataPtr CpuAllocator::allocate(std::size_t bytes) {
  const bool asks = sources_of_thread != nullptr && own_blocks_of_thread == 0;
  if (asks) {
    forget_those_that_are_over();
    if (void* const offered = take_offered(bytes)) {
      return {offered, offered, &free_block, c10::Device(c10::DeviceType::CPU)};
    }
  }
  c10::DataPtr block = from_heap(bytes);
  if (!block) {
    block = usual(bytes);
  }
  if (asks && sources_of_thread != nullptr) {
    for (const auto& source : *sources_of_thread) {
      source->note(bytes, block.get());
    }
  }
  return block;
}

// The first block that a source of this thread has; null where none has one.
void* CpuAllocator::take_offered(std::size_t bytes) {
  if (sources_of_thread == nullptr) {
    return nullptr;
  }
  for (const auto& source : *sources_of_thread) {
    if (c10::intrusive_ptr<c10::StorageImpl> storage = source->offer(bytes)) {
      void* const block = storage->mutable_data();
      {
        const std::lock_guard lock(offered_mutex_);
        offered_.insert_or_assign(block, std::move(storage));
        offered_count_.store(offered_.size());
      }
      for (const auto& each : *sources_of_thread) {
        each->note(bytes, block);
      }
      return block;
    }
  }
  return nullptr;
}

c10::DataPtr CpuAllocator::from_heap(std::size_t bytes) {
  if (bytes >= kLeastSharedBytes) {
    if (const std::shared_ptr<AllocationHeap> heap = AllocationHeap::current()) {
      if (std::byte* const block = heap->allocate(bytes)) {
        c10::profiledCPUMemoryReporter().New(block, bytes);
        return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
      }
    }
  }
  return {};
}

c10::DataPtr CpuAllocator::usual(std::size_t bytes) {
  c10::DataPtr block = usual_.load()->allocate(bytes);
  if (block.get_deleter() == usual_deleter && block.get() == block.get_context()) {
    static_cast<void>(block.compare_exchange_deleter(usual_deleter, &free_block));
  }
  return block;
}

// False where no source has offered it.
bool CpuAllocator::give_back_offered(void* block) {
  if (offered_count_.load() == 0) {
    return false;
  }
  c10::intrusive_ptr<c10::StorageImpl> storage;  // let go of without the lock
  const std::lock_guard lock(offered_mutex_);
  const auto found = offered_.find(block);
  if (found == offered_.end()) {
    return false;
  }
  storage = std::move(found->second);
  offered_.erase(found);
  offered_count_.store(offered_.size());
  return true;
}

void CpuAllocator::free_block(void* block) {
  if (get().give_back_offered(block)) {
    return;
  }
  if (const std::shared_ptr<AllocationHeap> heap = AllocationHeap::of(block)) {
    c10::profiledCPUMemoryReporter().Delete(block);
    heap->release(static_cast<std::byte*>(block));
  } else {
    usual_deleter(block);
  }
}

}  // namespace pydist
