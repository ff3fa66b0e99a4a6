// Torch's CPU allocator, where this library has a say in where blocks come from.
//
// It takes the place of the allocator that torch has, and asks that one for whatever nobody else
// has a block for: first what the thread that allocates has named (BlockSource), then, within
// pydist.share_allocations(), the heap that the other ranks of the host may read. A block goes back
// to where it comes from, whenever and on whichever thread that is.
//
// Once installed, it stays: libraries may free a block by the allocator that is installed by then.
//
// Thread safe.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace pydist {

// Knows for some of a thread's blocks where they should lie. Called on that thread alone.
class BlockSource {
 public:
  BlockSource() = default;
  BlockSource(const BlockSource&) = delete;
  BlockSource& operator=(const BlockSource&) = delete;
  virtual ~BlockSource() = default;

  // Whether it is asked no more, from the next block on.
  [[nodiscard]] virtual bool is_over() const noexcept = 0;
  // A block of so many bytes is wanted. A storage whose memory it is to be, of that size and on the
  // CPU, which is kept until the block is freed; null: it may lie anywhere.
  [[nodiscard]] virtual c10::intrusive_ptr<c10::StorageImpl> offer(std::size_t bytes) = 0;
  // Which block it has become, of this source or not.
  virtual void note(std::size_t bytes, const void* block) = 0;
};

class CpuAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors and their storages refer to it.
  static CpuAllocator& get();

  // Why it cannot take the place of torch's allocator; empty where it can, and then has taken it.
  [[nodiscard]] std::string install();

  // Asks `source` for the blocks of the calling thread, before those that it asks already.
  static void ask(std::shared_ptr<BlockSource> source);
  // While it lives, sources are not asked for blocks of this thread, nor told of them.
  class OwnBlocks {
   public:
    OwnBlocks() noexcept;
    OwnBlocks(const OwnBlocks&) = delete;
    OwnBlocks& operator=(const OwnBlocks&) = delete;
    ~OwnBlocks();
  };

  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override;
  // Of all blocks that allocate() returns.
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  CpuAllocator();

  [[nodiscard]] void* take_offered(std::size_t bytes);
  [[nodiscard]] static c10::DataPtr from_heap(std::size_t bytes);
  [[nodiscard]] c10::DataPtr usual(std::size_t bytes);
  [[nodiscard]] bool give_back_offered(void* block);
  static void free_block(void* block);

  static inline std::atomic<c10::DeleterFnPtr> usual_deleter{nullptr};

  std::mutex mutex_;
  std::atomic<c10::Allocator*> usual_{nullptr};

  std::mutex offered_mutex_;
  // What sources have offered and nobody has freed, by address; guarded by offered_mutex_.
  std::unordered_map<const void*, c10::intrusive_ptr<c10::StorageImpl>> offered_;
  std::atomic<std::size_t> offered_count_{0};
};

}  // namespace pydist
