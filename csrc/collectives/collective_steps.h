// What the steps of one collective share, in which elements are combined in rank order: its group,
// its call, and how elements are copied and combined, between buffers and what travels.

#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/streaming_hint.h"
#include "collectives/wire.h"
#include "kernels/cpu/reduce.h"

namespace pydist {

class Collective {
 public:
  Collective(Group& group, const Call& call)
      : group_(group),
        call_(call),
        me_(group.rank()),
        size_(group.size()),
        element_bytes_(element_size(call.dtype)),
        wire_(call.dtype, call.wire_dtype) {}

  [[nodiscard]] Group& group() const noexcept { return group_; }
  [[nodiscard]] const Call& call() const noexcept { return call_; }
  [[nodiscard]] int me() const noexcept { return me_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] bool is_root() const noexcept { return me_ == call_.root; }
  // Bytes of an element in a buffer, and in posts and slots. They differ only where
  // call().wire_dtype says so, which reductions alone may have.
  [[nodiscard]] std::size_t element_bytes() const noexcept { return element_bytes_; }
  [[nodiscard]] std::size_t slot_element_bytes() const noexcept { return wire_.bytes(1); }
  [[nodiscard]] const Wire& wire() const noexcept { return wire_; }

  // Bytes of `elements`, for offsets.
  [[nodiscard]] std::size_t bytes(std::size_t elements) const noexcept {
    return elements * element_bytes_;
  }
  [[nodiscard]] std::size_t slot_bytes(std::size_t elements) const noexcept {
    return wire_.bytes(elements);
  }

  // Combines one piece of every rank's input in rank order; `source(rank)` is where it lies: this
  // rank's in its buffer, the others' as they travelled. The result goes into a slot, a buffer, or
  // both; the other is null.
  template <typename Source>
  void reduce_pieces(Source source, std::byte* slot, std::byte* output, std::size_t count) {
    if (count != 0) {
      wire_.combine(reduction(), gather_sources(source), static_cast<std::size_t>(me_), slot,
                    output, count);
    }
  }

  // The same where all pieces and targets are buffers.
  template <typename Source>
  void reduce_buffers(Source source, std::span<void* const> targets, std::size_t count,
                      StoreHint hint) {
    if (count != 0) {
      reduce(reduction(), gather_sources(source), targets, count, hint);
    }
  }

  void put(std::byte* slot, const std::byte* source, std::size_t elements) const {
    wire_.put(slot, source, elements);
  }

  // How results of `bytes` in one buffer are stored.
  [[nodiscard]] StoreHint hint_for(std::size_t bytes) const noexcept {
    return group_.store_hint().value_or(pydist::hint_for(bytes));
  }

  // What has arrived where it belongs, see ReceiveChannel::expect(), stays.
  void take(std::byte* target, const std::byte* slot, std::size_t elements) const {
    if (target != slot) {
      wire_.take(target, slot, elements, hint_for(bytes(call_.count)));
    }
  }

  // Between buffers, or to one from what travelled as it is. As take().
  void copy(std::byte* target, const std::byte* source, std::size_t elements) const {
    if (target != source && elements != 0) {
      copy_bytes(target, source, bytes(elements), hint_for(bytes(call_.count)));
    }
  }

 private:
  template <typename Source>
  std::span<const void*> gather_sources(Source source) {
    const auto size = static_cast<std::size_t>(size_);
    const void** sources = few_sources_.data();
    if (size > few_sources_.size()) {
      sources_.resize(size);
      sources = sources_.data();
    }
    for (int rank = 0; rank < size_; ++rank) {
      sources[rank] = source(rank);
    }
    return {sources, size};
  }

  Reduction reduction() { return {wire_.dtype(), call_.op, static_cast<double>(size_), factors()}; }

  // All ranks' factors for premul_sum; they travel with the posts.
  std::span<const double> factors() {
    if (call_.op != ReduceOp::kPremulSum) {
      return {};
    }
    if (factors_.empty()) {
      for (int rank = 0; rank < size_; ++rank) {
        factors_.push_back(group_.detail(rank).factor);
      }
    }
    return factors_;
  }

  Group& group_;
  const Call& call_;
  const int me_;
  const int size_;
  const std::size_t element_bytes_;
  const Wire wire_;
  std::array<const void*, 4> few_sources_;
  std::vector<const void*> sources_;  // of more ranks
  std::vector<double> factors_;
};

}  // namespace pydist
