// The memory of a module's gradients: blocks, cut into buckets, cut into slots.
//
// The gradients of one dtype and device lie in one *block* of memory that the communicator
// allocated, symmetric where it can, so that collectives on it copy nothing in or out. Parameters
// that join the model later get a block of their own. A block is cut into *buckets*, each of which
// travels in one operation, and those into *slots*, one for each parameter. Complex numbers travel
// as pairs of reals: sums and averages are the same.
//
// Gradients of parameters whose optimizer has shards lie in blocks of their own, of which each
// optimizer has some. Their buckets, once cut, stay as they are, in their places: a new plan only
// changes the order in which they travel. See gradient_shard.h.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucketing/plan_message.h"
#include "bucketing/shard_layout.h"
#include "communicator/communicator.h"
#include "reducer/gradients/berth.h"
#include "reducer/gradients/gradient_shard.h"
#include "reducer/gradients/gradient_slot.h"
#include "reducer/gradients/lent_memory.h"

namespace pydist {

struct GradientBucket {
  std::string label;
  at::Tensor memory;
  // What travels in this round, once launched: `memory`, unless somebody holds a part of it.
  at::Tensor travelling;
  std::vector<std::size_t> slots;  // by index
  // How many of these slots are not complete yet in this round, and of those without a place that
  // count as part of the last bucket.
  std::size_t missing = 0;
  // On a device: the streams on which gradients have come in this round. Nearly always one.
  std::vector<c10::Stream> streams;

  // Of a bucket that is sharded; see gradient_shard.h.
  int owner = 0;
  std::size_t number = 0;  // among the owner's, for good
  ShardLayout layout;
  at::Tensor shard;              // this rank's
  std::shared_ptr<Berth> berth;  // stage 2
};

class GradientArena {
 public:
  // Lends the memory of gradients, unless they are to be mere views of it; see lent_memory.h.
  GradientArena(CommunicatorPtr communicator, bool lends)
      : communicator_(std::move(communicator)), lends_(lends) {}

  // A slot without a place; the same on every rank, in the same order.
  GradientSlot& add(std::string name, at::Tensor parameter, bool is_sparse);

  // Collective: memory for the slots that need a place and have no block.
  void allocate();

  // Lets the optimizer `owner` have shards of the gradients of some slots, from the next arrange()
  // on; `shown` are their stand-ins. All slots that have no shards yet lose their places.
  void shard(int owner, int stage, const std::vector<std::size_t>& slots,
             const std::vector<at::Tensor>& shown);

  // From the next arrange() on, the gradients of a bucket lie without gaps, as a hook expects them.
  void pack() noexcept { is_packed_ = true; }

  // Cuts the blocks anew, after allocate(). Gradients that lie there move along, unless somebody
  // holds them. Throws InvalidUsage if the plan does not fit; nothing has changed then. Collective
  // if slots of a sharded optimizer have no place yet.
  void arrange(const BucketPlan& plan);

  // The plan `wished`, changed so that no sharded bucket is cut anew.
  [[nodiscard]] BucketPlan feasible(const BucketPlan& wished) const;

  // Returns whether the bucket has its memory. Takes that memory if it is free, or, if the bucket
  // `is_next` to be launched, from a bucket that is launched later and in which nothing is landing.
  [[nodiscard]] bool bind(const GradientBucket& bucket, bool is_next);
  // Whether a gradient is landing in one of these slots: some thread is between the hook before the
  // accumulation and the one after it. It may be the thread of another device, or this one, if a
  // hook has begun another backward.
  [[nodiscard]] bool is_landing_in(const std::vector<std::size_t>& members) const;
  // Takes back all memory that buckets share.
  void release();
  // Forgets where gradients lie: from now on they belong to another reducer.
  void let_go();

  [[nodiscard]] LentMemory& lent() noexcept { return lent_; }
  [[nodiscard]] const BucketPlan& plan() const noexcept { return plan_; }
  // The block of each slot.
  [[nodiscard]] const std::vector<std::size_t>& blocks() const noexcept { return block_of_; }
  [[nodiscard]] std::vector<GradientSlot>& slots() noexcept { return slots_; }
  [[nodiscard]] const std::vector<GradientSlot>& slots() const noexcept { return slots_; }
  // In the order of launching.
  [[nodiscard]] std::vector<GradientBucket>& buckets() noexcept { return buckets_; }
  [[nodiscard]] const std::vector<GradientBucket>& buckets() const noexcept { return buckets_; }
  // The largest block, to measure with; undefined where there is none.
  [[nodiscard]] at::Tensor largest_block() const;
  // Where gradients lie that are not on the CPU; the first such device, if any.
  [[nodiscard]] const std::optional<Device>& device() const noexcept { return device_; }
  // Bytes of all memory that the buckets of an optimizer share.
  [[nodiscard]] std::size_t berth_bytes(int owner) const;
  // Whether slots that are to have shards have no place yet.
  [[nodiscard]] bool has_uncut() const;
  // How often buckets with shards were cut.
  [[nodiscard]] std::size_t shardings() const noexcept { return shardings_; }

 private:
  void cut(const std::vector<GradientBucket*>& buckets, const at::Tensor& first);
  void evict_from(Berth& berth);

  const CommunicatorPtr communicator_;
  const bool lends_;
  bool is_packed_ = false;
  LentMemory lent_;
  std::vector<GradientSlot> slots_;
  std::vector<std::size_t> block_of_;
  std::vector<at::Tensor> blocks_;  // of one dimension, of the real dtype; undefined: with shards
  std::map<int, int> stages_;       // of the owners of shards
  std::map<int, std::size_t> bucket_counts_;
  std::multimap<int, std::shared_ptr<Berth>> berths_;  // by owner
  std::optional<Device> device_;
  std::size_t shardings_ = 0;
  BucketPlan plan_;
  std::vector<GradientBucket> buckets_;
};

}  // namespace pydist
