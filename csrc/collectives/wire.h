// The type in which elements travel between ranks: that of the buffers, or another one, to which
// they are converted on the way into a slot and from which they are on the way out.
//
//   float32 as float16 or bfloat16   where the caller asks for it (Operation::wire_dtype): half the
//                                    bytes, a rounding on the way in and one of the result
//   float16 or bfloat16 as float32   for partial sums, so that the result alone is rounded (ring.h)
//
// Reductions combine what travels: every operand, one's own included, in the wire type. So a result
// does not depend on which rank computes it. A value; thread safe.

#pragma once

#include <cstddef>
#include <cstring>
#include <span>

#include "base/dtype.h"
#include "kernels/cpu/reduce.h"

namespace pydist {

class Wire {
 public:
  Wire(DType buffers, DType wire) noexcept
      : buffers_(buffers), wire_(wire), wire_element_bytes_(element_size(wire)) {}

  [[nodiscard]] DType dtype() const noexcept { return wire_; }
  [[nodiscard]] bool converts() const noexcept { return wire_ != buffers_; }
  // Bytes of `elements` as they travel.
  [[nodiscard]] std::size_t bytes(std::size_t elements) const noexcept {
    return elements * wire_element_bytes_;
  }

  // Between a buffer and a slot, which do not overlap. Small collectives take a fraction of a
  // microsecond in all: where nothing is converted, these are the copies and no more.
  //
  // Note [Stores into shared lines]: peers still hold the lines of a slot since they last read
  // them, and the stores of a kernel, one vector each, fetch every line back first. memcpy knows
  // its processor's way to write whole lines without that. So only memcpy writes much into slots;
  // kernels write where nobody else reads. See decision 6.
  void put(std::byte* slot, const std::byte* elements, std::size_t count) const {
    if (converts()) {
      put_converted(slot, elements, count);
    } else if (count != 0) {
      std::memcpy(slot, elements, bytes(count));
    }
  }
  void take(std::byte* elements, const std::byte* slot, std::size_t count,
            StoreHint hint = StoreHint::kCached) const {
    if (converts()) {
      convert(wire_, slot, buffers_, elements, count);
    } else {
      copy_bytes(elements, slot, bytes(count), hint);
    }
  }

  // Combines `pieces` in their order: pieces[own] lies in a buffer, the others as they travelled.
  // The result goes into `slot`, as it travels, which may be the very piece of another rank, and
  // into `output`, a buffer, which may be the very piece of this rank; one of the two may be null.
  // `reduction` is in dtype(). Changes `pieces`.
  void combine(const Reduction& reduction, std::span<const void*> pieces, std::size_t own,
               std::byte* slot, std::byte* output, std::size_t count) const {
    if (converts()) {
      combine_converted(reduction, pieces, own, slot, output, count);
      return;
    }
    if (output == nullptr) {
      combine_into_slot(reduction, pieces, slot, count);
      return;
    }
    if (slot != nullptr) {
      combine_into_both(reduction, pieces, slot, output, count);
      return;
    }
    void* const target = output;
    reduce(reduction, pieces, {&target, 1}, count);
  }

 private:
  static void convert(DType from, const std::byte* input, DType to, std::byte* output,
                      std::size_t count);
  void put_converted(std::byte* slot, const std::byte* elements, std::size_t count) const;
  void combine_into_slot(const Reduction& reduction, std::span<const void*> pieces, std::byte* slot,
                         std::size_t count) const;
  void combine_into_both(const Reduction& reduction, std::span<const void*> pieces, std::byte* slot,
                         std::byte* output, std::size_t count) const;
  void combine_converted(const Reduction& reduction, std::span<const void*> pieces, std::size_t own,
                         std::byte* slot, std::byte* output, std::size_t count) const;

  DType buffers_;
  DType wire_;
  std::size_t wire_element_bytes_;
};

}  // namespace pydist
