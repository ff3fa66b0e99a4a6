// The reduction kernels of one instruction set, in terms of simd.inc.h.
//
// A kernel is a format (how elements lie in memory and in the accumulator) times an operation (how
// accumulators combine). It walks the buffers in tiles of a few vectors: reads the tile from every
// input into registers, combining in input order, then writes it to every output. Nothing of a
// tile is written before all of it is read, so outputs may be inputs, and every byte is moved
// once.
//
// Included once by each kernels_<set>.cc. Internal linkage throughout: see Note [One definition
// rule and instruction sets].

#pragma once

#include "kernels/cpu/reduce_job.h"
#include "kernels/cpu/reduce_operators.inc.h"
#include "kernels/cpu/simd.inc.h"

namespace pydist::kernels {
namespace {

// ---- formats ------------------------------------------------------------------------------

template <typename Element>
struct Plain {
  static constexpr std::size_t kElementBytes = sizeof(Element);
  using Accumulator = Vector<Element>;
  static PYDIST_INLINE Accumulator unpack(Raw raw) { return (Accumulator)raw; }
  static PYDIST_INLINE Raw pack(Accumulator value) { return (Raw)value; }
};

struct BFloat16 {
  static constexpr std::size_t kElementBytes = 2;
  using Accumulator = Pair;
  static PYDIST_INLINE Pair unpack(Raw raw) { return widen_to_upper_halves(raw); }
  static PYDIST_INLINE Raw pack(Pair value) {
    return narrow_upper_halves(round_to_upper_half(value.low), round_to_upper_half(value.high));
  }
};

struct Float16 {
  static constexpr std::size_t kElementBytes = 2;
  using Accumulator = Pair;
  static PYDIST_INLINE Pair unpack(Raw raw) { return widen_float16(raw); }
  static PYDIST_INLINE Raw pack(Pair value) { return narrow_float16(value); }
};

// One byte, of which any value but zero is true.
struct Bool {
  static constexpr std::size_t kElementBytes = 1;
  using Accumulator = Raw;
  static PYDIST_INLINE Raw unpack(Raw raw) { return (Raw)(raw != 0) & 1; }
  static PYDIST_INLINE Raw pack(Raw value) { return value; }
};

// Pairs of (real, imaginary); only the product needs to know of them.
template <typename Element>
struct Complex : Plain<Element> {
  static constexpr std::size_t kElementBytes = 2 * sizeof(Element);
};

// ---- walking ------------------------------------------------------------------------------

// Vectors in a tile: enough to hide latencies, few enough to stay in registers.
constexpr std::size_t kTileVectors = 4;
constexpr std::size_t kTileBytes = kTileVectors * kVectorBytes;

// The prefetchers of today's processors follow two inputs well and four badly: there, asking for
// the tile one page ahead made bfloat16 sums from memory a third faster and float32 ones up to a
// fifth. Buffers below kPrefetchBytes are likely to be in cache, where it would only cost.
constexpr std::size_t kPrefetchDistanceBytes = 4096;
constexpr std::size_t kPrefetchBytes = 64 * 1024;
constexpr std::size_t kCacheLineBytes = 64;

PYDIST_INLINE void prefetch_tile(const unsigned char* from) {
  for (std::size_t line = 0; line < kTileBytes; line += kCacheLineBytes) {
    __builtin_prefetch(from + kPrefetchDistanceBytes + line);
  }
}

enum class Store { kCached, kStreaming };

// One job, walked by byte offset. kInputs and kOutputs are the counts where they are known when
// compiling, 0 where not.
template <typename Format, typename Operation, std::size_t kInputs, std::size_t kOutputs>
struct Walk {
  using Accumulator = typename Format::Accumulator;

  const ReduceJob& job;
  const Operation operation;
  const std::size_t input_count;
  const std::size_t output_count;
  const bool prefetch;

  explicit Walk(const ReduceJob& reduce_job)
      : job(reduce_job),
        operation(reduce_job),
        input_count(kInputs != 0 ? kInputs : reduce_job.input_count),
        output_count(kOutputs != 0 ? kOutputs : reduce_job.output_count),
        prefetch(kInputs == 0 && reduce_job.input_count > 2 &&
                 reduce_job.count * Format::kElementBytes >= kPrefetchBytes) {}

  PYDIST_INLINE const unsigned char* input(std::size_t i) const {
    return static_cast<const unsigned char*>(job.inputs[i]);
  }
  PYDIST_INLINE unsigned char* output(std::size_t k) const {
    return static_cast<unsigned char*>(job.outputs[k]);
  }

  template <Store kStore, std::size_t kVectors>
  PYDIST_INLINE void tile(std::size_t offset) const {
    Accumulator sum[kVectors];
    if (kVectors == kTileVectors && prefetch) {
      prefetch_tile(input(0) + offset);
    }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v) {
      sum[v] = operation.first(Format::unpack(load(input(0) + offset + v * kVectorBytes)), 0);
    }
    for (std::size_t i = 1; i < input_count; ++i) {
      const unsigned char* from = input(i) + offset;
      if (kVectors == kTileVectors && prefetch) {
        prefetch_tile(from);
      }
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        sum[v] = operation.next(sum[v], Format::unpack(load(from + v * kVectorBytes)), i);
      }
    }
    Raw result[kVectors];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v) {
      result[v] = Format::pack(operation.finish(sum[v]));
    }
    for (std::size_t k = 0; k < output_count; ++k) {
      unsigned char* to = output(k) + offset;
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        if constexpr (kStore == Store::kStreaming) {
          store_streaming(to + v * kVectorBytes, result[v]);
        } else {
          store(to + v * kVectorBytes, result[v]);
        }
      }
    }
  }

  // Fewer bytes than a vector has.
  [[gnu::noinline]] void partial(std::size_t offset, std::size_t bytes) const {
    Accumulator sum = operation.first(Format::unpack(load_partial(input(0) + offset, bytes)), 0);
    for (std::size_t i = 1; i < input_count; ++i) {
      sum = operation.next(sum, Format::unpack(load_partial(input(i) + offset, bytes)), i);
    }
    const Raw result = Format::pack(operation.finish(sum));
    for (std::size_t k = 0; k < output_count; ++k) {
      store_partial(output(k) + offset, result, bytes);
    }
  }

  // From `offset` to `end`, in whole tiles; returns where it stopped.
  template <Store kStore>
  std::size_t whole_tiles(std::size_t offset, std::size_t end) const {
    for (; end - offset >= kTileBytes; offset += kTileBytes) {
      tile<kStore, kTileVectors>(offset);
    }
    return offset;
  }

  void rest(std::size_t offset, std::size_t end) const {
    for (; end - offset >= kVectorBytes; offset += kVectorBytes) {
      tile<Store::kCached, 1>(offset);
    }
    if (offset < end) {
      partial(offset, end - offset);
    }
  }

  // Bytes before all outputs are aligned for streaming stores, or kVectorBytes if they never are
  // together.
  std::size_t bytes_to_alignment() const {
    const std::size_t skew = reinterpret_cast<std::uintptr_t>(output(0)) % kVectorBytes;
    for (std::size_t k = 1; k < output_count; ++k) {
      if (reinterpret_cast<std::uintptr_t>(output(k)) % kVectorBytes != skew) {
        return kVectorBytes;
      }
    }
    const std::size_t bytes = (kVectorBytes - skew) % kVectorBytes;
    return bytes % Format::kElementBytes == 0 ? bytes : kVectorBytes;
  }

  void run(std::size_t end) const {
    std::size_t offset = 0;
    const std::size_t head =
        job.streaming && end >= 2 * kTileBytes ? bytes_to_alignment() : kVectorBytes;
    if (head < kVectorBytes) {
      if (head > 0) {
        partial(0, head);
      }
      offset = whole_tiles<Store::kStreaming>(head, end);
      streaming_fence();
    } else {
      offset = whole_tiles<Store::kCached>(0, end);
    }
    rest(offset, end);
  }
};

// ---- dispatch -----------------------------------------------------------------------------

template <typename Format, typename Operation>
void reduce_any(const ReduceJob& job, std::size_t bytes) {
  Walk<Format, Operation, 0, 0>(job).run(bytes);
}

// Two ranks on a host is the commonest case of all: their loops know the counts.
template <typename Format, typename Operation>
void reduce_sum(const ReduceJob& job, std::size_t bytes) {
  if (job.input_count == 2 && job.output_count == 1) {
    Walk<Format, Operation, 2, 1>(job).run(bytes);
  } else if (job.input_count == 2 && job.output_count == 2) {
    Walk<Format, Operation, 2, 2>(job).run(bytes);
  } else {
    Walk<Format, Operation, 0, 0>(job).run(bytes);
  }
}

template <typename Format>
void reduce_float(const ReduceJob& job, std::size_t bytes) {
  switch (job.op) {
    case ReduceOp::kSum:
      return reduce_sum<Format, Sum>(job, bytes);
    case ReduceOp::kMean:
      return reduce_sum<Format, Mean>(job, bytes);
    case ReduceOp::kMin:
      return reduce_any<Format, Minimum>(job, bytes);
    case ReduceOp::kMax:
      return reduce_any<Format, Maximum>(job, bytes);
    case ReduceOp::kProd:
      return reduce_any<Format, Product>(job, bytes);
    case ReduceOp::kPremulSum:
      return reduce_any<Format, PremultipliedSum>(job, bytes);
    default:
      return;
  }
}

// Sums, means and real factors act on the parts alone.
template <typename Element>
void reduce_complex(const ReduceJob& job, std::size_t bytes) {
  if (job.op == ReduceOp::kProd) {
    reduce_any<Complex<Element>, ComplexProduct>(job, bytes);
  } else {
    reduce_float<Plain<Element>>(job, bytes);
  }
}

// Sums and products are the same for both signs, and only the unsigned ones may overflow.
template <typename Signed, typename Unsigned>
void reduce_integer(const ReduceJob& job, std::size_t bytes, bool is_signed) {
  switch (job.op) {
    case ReduceOp::kSum:
      return reduce_any<Plain<Unsigned>, Sum>(job, bytes);
    case ReduceOp::kProd:
      return reduce_any<Plain<Unsigned>, Product>(job, bytes);
    case ReduceOp::kMin:
      return is_signed ? reduce_any<Plain<Signed>, Minimum>(job, bytes)
                       : reduce_any<Plain<Unsigned>, Minimum>(job, bytes);
    case ReduceOp::kMax:
      return is_signed ? reduce_any<Plain<Signed>, Maximum>(job, bytes)
                       : reduce_any<Plain<Unsigned>, Maximum>(job, bytes);
    case ReduceOp::kBand:
      return reduce_any<Plain<std::uint8_t>, And>(job, bytes);
    case ReduceOp::kBor:
      return reduce_any<Plain<std::uint8_t>, Or>(job, bytes);
    case ReduceOp::kBxor:
      return reduce_any<Plain<std::uint8_t>, Xor>(job, bytes);
    default:
      return;
  }
}

void reduce_bool(const ReduceJob& job, std::size_t bytes) {
  switch (job.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return reduce_any<Bool, Or>(job, bytes);
    case ReduceOp::kProd:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return reduce_any<Bool, And>(job, bytes);
    case ReduceOp::kBxor:
      return reduce_any<Bool, Xor>(job, bytes);
    default:
      return;
  }
}

void reduce_here(const ReduceJob& job) noexcept {
  const std::size_t count = job.count;
  switch (job.dtype) {
    case DType::kFloat64:
      return reduce_float<Plain<double>>(job, count * 8);
    case DType::kFloat32:
      return reduce_float<Plain<float>>(job, count * 4);
    case DType::kFloat16:
      return reduce_float<Float16>(job, count * 2);
    case DType::kBFloat16:
      return reduce_float<BFloat16>(job, count * 2);
    case DType::kInt8:
    case DType::kUInt8:
      return reduce_integer<std::int8_t, std::uint8_t>(job, count, job.dtype == DType::kInt8);
    case DType::kInt16:
    case DType::kUInt16:
      return reduce_integer<std::int16_t, std::uint16_t>(job, count * 2,
                                                         job.dtype == DType::kInt16);
    case DType::kInt32:
    case DType::kUInt32:
      return reduce_integer<std::int32_t, std::uint32_t>(job, count * 4,
                                                         job.dtype == DType::kInt32);
    case DType::kInt64:
    case DType::kUInt64:
      return reduce_integer<std::int64_t, std::uint64_t>(job, count * 8,
                                                         job.dtype == DType::kInt64);
    case DType::kBool:
      return reduce_bool(job, count);
    case DType::kComplex64:
      return reduce_complex<float>(job, count * 8);
    case DType::kComplex128:
      return reduce_complex<double>(job, count * 16);
    case DType::kFloat8:
      return;
  }
}

void copy_streaming_here(void* output, const void* input, std::size_t bytes) noexcept {
  auto* to = static_cast<unsigned char*>(output);
  const auto* from = static_cast<const unsigned char*>(input);
  const std::size_t skew = reinterpret_cast<std::uintptr_t>(to) % kVectorBytes;
  std::size_t offset = (kVectorBytes - skew) % kVectorBytes;
  if (offset > bytes) {
    offset = bytes;
  }
  __builtin_memcpy(to, from, offset);
  for (; bytes - offset >= kTileBytes; offset += kTileBytes) {
    Raw raw[kTileVectors];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kTileVectors; ++v) {
      raw[v] = load(from + offset + v * kVectorBytes);
    }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kTileVectors; ++v) {
      store_streaming(to + offset + v * kVectorBytes, raw[v]);
    }
  }
  streaming_fence();
  __builtin_memcpy(to + offset, from + offset, bytes - offset);
}

}  // namespace
}  // namespace pydist::kernels
