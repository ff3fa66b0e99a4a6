#include "reducer/gradients/gradient_arena.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "c10d/device_streams.h"
#include "c10d/memory_tensor.h"

namespace pydist {
namespace {

// Slots start on a cache line, which every SIMD width divides.
constexpr std::int64_t kAlignmentBytes = 64;

// Enough for a bucket that fills, one that waits for its turn and one that travels.
constexpr std::size_t kBerths = 3;

at::ScalarType real_type(const at::Tensor& parameter) {
  return c10::toRealValueType(parameter.scalar_type());
}

std::int64_t padded(std::int64_t count, at::ScalarType dtype) {
  const std::int64_t alignment =
      kAlignmentBytes / static_cast<std::int64_t>(c10::elementSize(dtype));
  return (count + alignment - 1) / alignment * alignment;
}

// Optimizers and AccumulateGrad are fastest where gradient and parameter are laid out alike.
std::vector<std::int64_t> strides_for(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()));
  std::int64_t stride = 1;
  for (std::size_t dimension = strides.size(); dimension-- > 0;) {
    strides[dimension] = stride;
    stride *= parameter.size(static_cast<std::int64_t>(dimension));
  }
  return strides;
}

// A parameter's part of a block.
at::Tensor view_for(const GradientSlot& slot, const at::Tensor& block, std::int64_t offset) {
  return shaped(slot, block.narrow(0, offset, real_count(slot.parameter)));
}

// The same, with a storage of its own.
at::Tensor home_for(const GradientSlot& slot, const at::Tensor& block, std::int64_t offset) {
  return shaped(slot, part_with_storage(block, offset, real_count(slot.parameter)));
}

// One-dimensional. Collective.
at::Tensor allocate_zeros(Communicator& communicator, std::int64_t count, at::ScalarType dtype,
                          Device device) {
  const std::size_t bytes = static_cast<std::size_t>(count) * c10::elementSize(dtype);
  return tensor_over(communicator.allocate(bytes, device), {count}, dtype, device).zero_();
}

}  // namespace

GradientSlot& GradientArena::add(std::string name, at::Tensor parameter, bool is_sparse) {
  GradientSlot& slot = slots_.emplace_back();
  slot.index = slots_.size() - 1;
  slot.name = std::move(name);
  slot.parameter = std::move(parameter);
  slot.is_sparse = is_sparse;
  slot.strides = strides_for(slot.parameter);
  block_of_.push_back(kNoBlock);
  return slot;
}

void GradientArena::allocate() {
  // The numbers of devices differ between ranks, but every rank comes to its devices in the same
  // order.
  using Kind = std::tuple<int, at::ScalarType, at::Device>;  // the owner first
  std::vector<std::pair<Kind, std::int64_t>> added;          // and the elements of each
  for (const GradientSlot& slot : slots_) {
    if (slot.is_sparse || block_of_[slot.index] != kNoBlock) {
      continue;
    }
    // By its own dtype: a complex number that lay behind an odd number of reals would lie between
    // two places of its size.
    const Kind kind(slot.owner, slot.parameter.scalar_type(), slot.parameter.device());
    auto found = std::find_if(added.begin(), added.end(),
                              [&kind](const auto& each) { return each.first == kind; });
    if (found == added.end()) {
      found = added.insert(added.end(), {kind, 0});
    }
    block_of_[slot.index] = blocks_.size() + static_cast<std::size_t>(found - added.begin());
    found->second += padded(real_count(slot.parameter), real_type(slot.parameter));
  }
  for (const auto& [kind, count] : added) {
    const auto& [owner, dtype, device] = kind;
    blocks_.push_back(owner == 0 ? allocate_zeros(*communicator_, count,
                                                  c10::toRealValueType(dtype), device_of(device))
                                 : at::Tensor());
  }
}

void GradientArena::shard(int owner, int stage, const std::vector<std::size_t>& slots,
                          const std::vector<at::Tensor>& shown) {
  stages_.emplace(owner, stage);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    GradientSlot& slot = slots_[slots[i]];
    PYDIST_CHECK(slot.owner == 0 && !slot.is_sparse);
    slot.owner = owner;
    slot.shown = shown[i];
    // The old place is in a block with others.
    slot.view.reset();
    slot.home.reset();
    block_of_[slot.index] = kNoBlock;
  }
  for (const GradientSlot& slot : slots_) {
    if (slot.owner == 0) {
      block_of_[slot.index] = kNoBlock;
    }
  }
  // No slot lies in any of them any more, and memory of sharded gradients belongs to their buckets.
  for (at::Tensor& block : blocks_) {
    block.reset();
  }
  for (GradientBucket& bucket : buckets_) {
    if (bucket.owner == 0) {
      bucket.memory.reset();
    }
  }
}

BucketPlan GradientArena::feasible(const BucketPlan& wished) const {
  BucketPlan fixed;
  for (const GradientBucket& bucket : buckets_) {
    if (bucket.owner != 0) {
      fixed.push_back(bucket.slots);
    }
  }
  return with_fixed_buckets(wished, fixed);
}

void GradientArena::arrange(const BucketPlan& plan) {
  if (const std::string why = why_invalid(plan, block_of_); !why.empty()) {
    throw InvalidUsage(join("a plan of buckets does not fit the model: ", why));
  }
  std::vector<at::Tensor> moving(slots_.size());
  for (GradientSlot& slot : slots_) {
    if (slot.is_sparse || is_sharded(slot)) {
      continue;
    }
    if (lends_ && slot.owner == 0) {
      lent_.leave_home(slot);
    } else if (holds_gradient(slot)) {
      moving[slot.index] = slot.parameter.grad().clone();
    }
  }
  plan_ = plan;
  std::map<std::size_t, GradientBucket> sharded;  // by first slot
  for (GradientBucket& bucket : buckets_) {
    if (bucket.owner != 0) {
      const std::size_t first = bucket.slots.front();
      sharded.emplace(first, std::move(bucket));
    }
  }
  buckets_.clear();
  buckets_.reserve(plan.size());
  std::vector<std::int64_t> filled(blocks_.size(), 0);
  std::map<std::size_t, std::vector<GradientBucket*>> uncut;  // by block
  for (const std::vector<std::size_t>& members : plan) {
    const GradientSlot& first = slots_[members.front()];
    if (const auto found = sharded.find(members.front()); found != sharded.end()) {
      PYDIST_CHECK(found->second.slots == members);
      buckets_.push_back(std::move(found->second));
    } else {
      GradientBucket& bucket = buckets_.emplace_back();
      bucket.slots = members;
      bucket.owner = first.owner;
    }
    GradientBucket& bucket = buckets_.back();
    bucket.label = join("bucket ", buckets_.size() - 1, ", first parameter ", first.name);
    for (const std::size_t index : members) {
      slots_[index].bucket = buckets_.size() - 1;
    }
    const std::size_t number = block_of_[members.front()];
    if (bucket.owner != 0) {
      if (!bucket.memory.defined()) {
        uncut[number].push_back(&bucket);
      }
      continue;
    }
    const at::Tensor& block = blocks_[number];
    const std::int64_t begin = filled[number];
    for (const std::size_t index : members) {
      GradientSlot& slot = slots_[index];
      slot.offset = filled[number] - begin;
      if (!lends_) {
        slot.view = view_for(slot, block, filled[number]);
      } else {
        slot.home = home_for(slot, block, filled[number]);
        slot.view = has_place(slot) ? slot.view : slot.home;
      }
      const std::int64_t count = real_count(slot.parameter);
      filled[number] += is_packed_ ? count : padded(count, block.scalar_type());
    }
    bucket.memory = block.narrow(0, begin, filled[number] - begin);
    filled[number] = padded(filled[number], block.scalar_type());
  }
  for (const auto& [number, buckets] : uncut) {
    cut(buckets, slots_[buckets.front()->slots.front()].parameter);
  }
  device_.reset();
  for (GradientSlot& slot : slots_) {
    if (!device_ && has_place(slot) && !slot.view.is_cpu()) {
      device_ = device_of(slot.view.device());
    }
    lent_.go_home(slot);
    if (!has_place(slot)) {
      slot.bucket = buckets_.empty() ? 0 : buckets_.size() - 1;
    } else if (!moving[slot.index].defined()) {
      continue;
    } else if (is_sharded(slot)) {
      // Averaged as a whole, in the round in which it joined.
      slot.segment.copy_(segment_of(slot, moving[slot.index]));
      show_shard(slot);
      note_seen(slot);
    } else {
      // The same tensor, for those who hold it; and as touched as it was.
      slot.view.copy_(moving[slot.index]);
      slot.parameter.mutable_grad().set_data(slot.view);
    }
  }
}

// Gives buckets of one owner memory, places and shards, of the dtype and on the device of `first`.
void GradientArena::cut(const std::vector<GradientBucket*>& buckets, const at::Tensor& first) {
  const at::ScalarType dtype = real_type(first);
  const Device device = device_of(first.device());
  const int owner = buckets.front()->owner;
  std::int64_t total = 0;
  std::int64_t shards = 0;
  // Buckets take berths in turn, so that buckets that follow each other have different ones.
  std::vector<std::int64_t> berth_counts(std::min(kBerths, buckets.size()), 0);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    GradientBucket* const bucket = buckets[i];
    std::vector<std::size_t> counts;
    for (const std::size_t index : bucket->slots) {
      counts.push_back(static_cast<std::size_t>(real_count(slots_[index].parameter)));
    }
    bucket->layout = ShardLayout(std::move(counts), c10::elementSize(dtype), communicator_->size());
    bucket->number = bucket_counts_[owner]++;
    const auto count = static_cast<std::int64_t>(bucket->layout.count());
    total += count;
    std::int64_t& largest = berth_counts[i % berth_counts.size()];
    largest = std::max(largest, count);
    shards += static_cast<std::int64_t>(bucket->layout.shard());
  }
  at::Tensor memory;
  std::vector<std::shared_ptr<Berth>> berths;
  if (stages_.at(owner) == 1) {
    memory = allocate_zeros(*communicator_, total, dtype, device);
  } else {
    memory = at::zeros({shards}, first.options().dtype(dtype));
    for (const std::int64_t largest : berth_counts) {
      berths.push_back(
          std::make_shared<Berth>(allocate_zeros(*communicator_, largest, dtype, device)));
      berths_.emplace(owner, berths.back());
    }
  }
  std::int64_t next = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    GradientBucket& bucket = *buckets[i];
    const auto count = static_cast<std::int64_t>(bucket.layout.count());
    const auto shard = static_cast<std::int64_t>(bucket.layout.shard());
    if (berths.empty()) {
      bucket.memory = memory.narrow(0, next, count);
      bucket.shard = bucket.memory.narrow(0, communicator_->rank() * shard, shard);
      next += count;
    } else {
      bucket.berth = berths[i % berths.size()];
      bucket.memory = bucket.berth->memory().narrow(0, 0, count);
      bucket.shard = memory.narrow(0, next, shard);
      next += shard;
    }
    for (std::size_t member = 0; member < bucket.slots.size(); ++member) {
      GradientSlot& slot = slots_[bucket.slots[member]];
      slot.view =
          view_for(slot, bucket.memory, static_cast<std::int64_t>(bucket.layout.offsets()[member]));
      slot.is_bound = bucket.berth == nullptr;
      slot.segment = bucket.shard.narrow(0, 0, 0);
      slot.segment_begin = 0;
    }
    for (const ShardSegment& segment : bucket.layout.segments(communicator_->rank())) {
      GradientSlot& slot = slots_[bucket.slots[segment.slot]];
      slot.segment = bucket.shard.narrow(0, static_cast<std::int64_t>(segment.offset),
                                         static_cast<std::int64_t>(segment.count));
      slot.segment_begin = static_cast<std::int64_t>(segment.begin);
    }
  }
  ++shardings_;
}

bool GradientArena::has_uncut() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const GradientSlot& slot) {
    return slot.owner != 0 && !has_place(slot) && !slot.is_sparse;
  });
}

bool GradientArena::bind(const GradientBucket& bucket, bool is_next) {
  if (bucket.berth == nullptr) {
    return true;
  }
  if (!bucket.berth->serves(bucket.slots)) {
    if (is_next) {
      evict_from(*bucket.berth);
    }
    if (!bucket.berth->try_take(slots_, bucket.slots)) {
      return false;
    }
  }
  bucket.berth->enter();
  return true;
}

// Moves the gradients of a bucket that has yet to be launched out of the berth, on the current
// stream.
void GradientArena::evict_from(Berth& berth) {
  const std::optional<std::size_t> slot = berth.unlaunched();
  if (!slot || is_landing_in(buckets_[slots_[*slot].bucket].slots)) {
    return;
  }
  if (!berth.memory().is_cpu()) {
    std::vector<c10::Stream>& streams = buckets_[slots_[*slot].bucket].streams;
    const c10::Stream here = current_stream(device_of(berth.memory().device()));
    for (const c10::Stream& stream : streams) {
      wait_on_device(here, stream);
    }
    streams = {here};
  }
  berth.evict(slots_);
}

bool GradientArena::is_landing_in(const std::vector<std::size_t>& members) const {
  return std::any_of(members.begin(), members.end(),
                     [this](std::size_t index) { return slots_[index].landing != 0; });
}

void GradientArena::release() {
  for (const auto& [owner, berth] : berths_) {
    berth->release(slots_);
  }
}

void GradientArena::let_go() {
  for (GradientSlot& slot : slots_) {
    slot.view.reset();
    slot.home.reset();
  }
}

std::size_t GradientArena::berth_bytes(int owner) const {
  std::size_t bytes = 0;
  for (auto [it, end] = berths_.equal_range(owner); it != end; ++it) {
    bytes += it->second->memory().nbytes();
  }
  return bytes;
}

at::Tensor GradientArena::largest_block() const {
  at::Tensor largest;
  for (const at::Tensor& block : blocks_) {
    if (block.defined() && (!largest.defined() || block.nbytes() > largest.nbytes())) {
      largest = block;
    }
  }
  return largest;
}

}  // namespace pydist
