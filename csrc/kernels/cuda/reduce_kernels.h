// The reduction kernels: one or two inputs into one output. One kernel for each format; the
// operation is chosen when it runs, which costs nothing beside the memory, and keeps the library
// small.
//
// A unit is 16 bytes where all buffers are aligned alike, and one element before and behind those,
// or everywhere if they are not. A thread takes several units at a time, and loads them from both
// inputs before it combines them, so that many loads are in flight. It writes none of them before
// it has read all, so the output may be an input.

#pragma once

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/memory.h"

namespace pydist::cuda {

// Units that lie one behind the other. The first `tiled` are taken several at a time, the rest one
// by one, which shares few of them among more threads.
struct Stretch {
  std::uint64_t first;  // element
  std::uint64_t units;
  std::uint64_t tiled;
};

// ReduceOp as the kernels know it.
enum class Combination : std::uint8_t { kSum, kProduct, kMinimum, kMaximum, kAnd, kOr, kXor };

struct ReduceParams {
  const void* inputs[kPydistCudaMostInputs];
  double factors[kPydistCudaMostInputs];
  float factors_32[kPydistCudaMostInputs];
  DType dtypes[kPydistCudaMostInputs];  // mixed only
  void* output;
  Stretch aligned;   // of 16 bytes
  Stretch edges[2];  // of one element
  double divisor;
  float divisor_32;
  std::uint32_t input_count;
  Combination combination;
  bool is_signed;  // integers that are compared
  bool weighs;
  bool divides;
  DType output_dtype;  // mixed only
  DType wire_dtype;    // mixed only
};

// ---- units --------------------------------------------------------------------------------
// load() takes kCount units of input `i`, kStep elements apart; unpack() makes values of them, and
// store() writes results.

// All buffers of one format.
template <typename Format>
struct Uniform {
  static constexpr Family kFamily = Format::kFamily;

  template <bool kAligned>
  struct Unit {
    using Value = typename Format::Value;
    using Storage = typename Format::Storage;
    static constexpr int kElements = kAligned ? Format::kLanes : 1;
    static constexpr int kValues = kAligned ? Format::kValues : 1;
    // As many as stay in registers: two inputs' units, and values for two.
    static constexpr int kUnits = kValues >= 8 ? 2 : 4;
    static constexpr std::uint64_t kStep = std::uint64_t{kBlockThreads} * kElements;

    struct Raw {
      Words words;
    };
    struct RawElement {
      Storage stored;
    };
    using Loaded = std::conditional_t<kAligned, Raw, RawElement>;

    template <int kCount>
    static PYDIST_DEVICE void load(const ReduceParams& params, std::uint32_t i,
                                   std::uint64_t element, Loaded (&loaded)[kCount]) {
      const unsigned char* const from = at(params.inputs[i], element * sizeof(Storage));
      PYDIST_UNROLL
      for (int k = 0; k < kCount; ++k) {
        if constexpr (kAligned) {
          loaded[k].words = load_16(from + k * kStep * sizeof(Storage));
        } else {
          loaded[k].stored = load_element<Storage>(from + k * kStep * sizeof(Storage));
        }
      }
    }

    template <int kCount>
    static PYDIST_DEVICE void unpack(const ReduceParams&, std::uint32_t,
                                     const Loaded (&loaded)[kCount],
                                     Value (&values)[kCount][kValues]) {
      PYDIST_UNROLL
      for (int k = 0; k < kCount; ++k) {
        if constexpr (kAligned) {
          Format::unpack(loaded[k].words, values[k]);
        } else {
          values[k][0] = Format::unpack(loaded[k].stored);
        }
      }
    }

    template <int kCount>
    static PYDIST_DEVICE void store(const ReduceParams& params, std::uint64_t element,
                                    const Value (&values)[kCount][kValues]) {
      unsigned char* const to = at(params.output, element * sizeof(Storage));
      PYDIST_UNROLL
      for (int k = 0; k < kCount; ++k) {
        if constexpr (kAligned) {
          store_16(to + k * kStep * sizeof(Storage), Format::pack(values[k]));
        } else {
          store_element<Storage>(to + k * kStep * sizeof(Storage), Format::pack(values[k][0]));
        }
      }
    }
  };
};

// Every buffer float32, float16 or bfloat16, as its entry says. An aligned unit is four elements,
// so 16 or 8 bytes: neighbouring threads read neighbouring bytes of either.
struct Mixed {
  static constexpr Family kFamily = Family::kFloat;

  template <bool kAligned>
  struct Unit {
    using Value = float;
    static constexpr int kElements = kAligned ? 4 : 1;
    static constexpr int kValues = kElements;
    static constexpr int kUnits = 4;
    static constexpr std::uint64_t kStep = std::uint64_t{kBlockThreads} * kElements;

    struct Loaded {
      Words words;
    };

    template <int kCount>
    static PYDIST_DEVICE void load(const ReduceParams& params, std::uint32_t i,
                                   std::uint64_t element, Loaded (&loaded)[kCount]) {
      if (params.dtypes[i] == DType::kFloat32) {
        const unsigned char* const from = at(params.inputs[i], element * 4);
        PYDIST_UNROLL
        for (int k = 0; k < kCount; ++k) {
          if constexpr (kAligned) {
            loaded[k].words = load_16(from + k * kStep * 4);
          } else {
            loaded[k].words.word[0] = load_4(from + k * kStep * 4);
          }
        }
      } else {
        const unsigned char* const from = at(params.inputs[i], element * 2);
        PYDIST_UNROLL
        for (int k = 0; k < kCount; ++k) {
          if constexpr (kAligned) {
            loaded[k].words = load_8(from + k * kStep * 2);
          } else {
            loaded[k].words.word[0] = load_2(from + k * kStep * 2);
          }
        }
      }
    }

    template <int kCount>
    static PYDIST_DEVICE void unpack(const ReduceParams& params, std::uint32_t i,
                                     const Loaded (&loaded)[kCount],
                                     float (&values)[kCount][kValues]) {
      const DType dtype = params.dtypes[i];
      PYDIST_UNROLL
      for (int k = 0; k < kCount; ++k) {
        PYDIST_UNROLL
        for (int v = 0; v < kValues; ++v) {
          const Words& words = loaded[k].words;
          if (dtype == DType::kFloat32) {
            values[k][v] = through_wire(params.wire_dtype, bits_as<float>(words.word[v]));
          } else {
            const std::uint32_t half =
                v % 2 == 0 ? words.word[v / 2] & 0xffffu : words.word[v / 2] >> 16;
            values[k][v] = dtype == DType::kFloat16 ? widen_float16(half) : widen_bfloat16(half);
          }
        }
      }
    }

    template <int kCount>
    static PYDIST_DEVICE void store(const ReduceParams& params, std::uint64_t element,
                                    const float (&values)[kCount][kValues]) {
      const bool is_wide = params.output_dtype == DType::kFloat32;
      unsigned char* const to = at(params.output, element * (is_wide ? 4 : 2));
      PYDIST_UNROLL
      for (int k = 0; k < kCount; ++k) {
        if (is_wide) {
          Words words = {};
          PYDIST_UNROLL
          for (int v = 0; v < kValues; ++v) {
            words.word[v] =
                bits_as<std::uint32_t>(canonical(through_wire(params.wire_dtype, values[k][v])));
          }
          if constexpr (kAligned) {
            store_16(to + k * kStep * 4, words);
          } else {
            store_4(to + k * kStep * 4, words.word[0]);
          }
        } else {
          std::uint32_t half[kValues];
          PYDIST_UNROLL
          for (int v = 0; v < kValues; ++v) {
            half[v] = params.output_dtype == DType::kFloat16 ? narrow_float16(values[k][v])
                                                             : narrow_bfloat16(values[k][v]);
          }
          if constexpr (kAligned) {
            store_8(to + k * kStep * 2, Words{{half[0] | half[1] << 16, half[2] | half[3] << 16}});
          } else {
            store_2(to + k * kStep * 2, half[0]);
          }
        }
      }
    }

    static PYDIST_DEVICE float through_wire(DType wire, float value) {
      if (wire == DType::kFloat32) {
        return value;
      }
      return wire == DType::kFloat16 ? widen_float16(narrow_float16(value))
                                     : widen_bfloat16(narrow_bfloat16(value));
    }
  };
};

// ---- the kernel ---------------------------------------------------------------------------

template <typename Buffers>
struct Reduction {
  using Params = ReduceParams;
  static constexpr Family kFamily = Buffers::kFamily;

  static PYDIST_DEVICE void run(const ReduceParams& params, Place place) {
    walk<typename Buffers::template Unit<true>>(params, params.aligned, place);
    PYDIST_NO_UNROLL
    for (int edge = 0; edge < 2; ++edge) {
      walk<typename Buffers::template Unit<false>>(params, params.edges[edge], place);
    }
  }

 private:
  template <typename Unit>
  static PYDIST_DEVICE void walk(const ReduceParams& params, const Stretch& stretch, Place place) {
    constexpr std::uint64_t kTile = std::uint64_t{kBlockThreads} * Unit::kUnits;
    PYDIST_NO_UNROLL
    for (std::uint64_t unit = place.block * kTile + place.thread; unit < stretch.tiled;
         unit += place.blocks * kTile) {
      fold<Unit, Unit::kUnits>(params, stretch.first + unit * Unit::kElements);
    }
    PYDIST_NO_UNROLL
    for (std::uint64_t unit = stretch.tiled + place.block * kBlockThreads + place.thread;
         unit < stretch.units; unit += place.blocks * kBlockThreads) {
      fold<Unit, 1>(params, stretch.first + unit * Unit::kElements);
    }
  }

  template <typename Unit, int kCount>
  static PYDIST_DEVICE void fold(const ReduceParams& params, std::uint64_t element) {
    using Value = typename Unit::Value;
    typename Unit::Loaded first[kCount];
    typename Unit::Loaded second[kCount];
    Value sum[kCount][Unit::kValues];
    Unit::load(params, 0, element, first);
    if (params.input_count == 2) {
      Unit::load(params, 1, element, second);
    }
    Unit::unpack(params, 0, first, sum);
    weigh(params, 0, sum);
    if (params.input_count == 2) {
      Value values[kCount][Unit::kValues];
      Unit::unpack(params, 1, second, values);
      weigh(params, 1, values);
      combine(params, sum, values);
    }
    divide(params, sum);
    Unit::store(params, element, sum);
  }

  template <typename Value, int kCount, int kValues>
  static PYDIST_DEVICE void combine(const ReduceParams& params, Value (&sum)[kCount][kValues],
                                    const Value (&values)[kCount][kValues]) {
    if constexpr (kFamily == Family::kComplex) {
      each<Product>(sum, values);
    } else if constexpr (kFamily == Family::kBits) {
      switch (params.combination) {
        case Combination::kAnd:
          return each<And>(sum, values);
        case Combination::kOr:
          return each<Or>(sum, values);
        default:
          return each<Xor>(sum, values);
      }
    } else {
      switch (params.combination) {
        case Combination::kSum:
          return each<Sum>(sum, values);
        case Combination::kProduct:
          return each<Product>(sum, values);
        case Combination::kMinimum:
          if constexpr (kFamily == Family::kInteger) {
            if (params.is_signed) {
              return each<Minimum<std::make_signed_t<Value>>>(sum, values);
            }
          }
          return each<Minimum<Value>>(sum, values);
        default:
          if constexpr (kFamily == Family::kInteger) {
            if (params.is_signed) {
              return each<Maximum<std::make_signed_t<Value>>>(sum, values);
            }
          }
          return each<Maximum<Value>>(sum, values);
      }
    }
  }

  template <typename Operation, typename Value, int kCount, int kValues>
  static PYDIST_DEVICE void each(Value (&sum)[kCount][kValues],
                                 const Value (&values)[kCount][kValues]) {
    PYDIST_UNROLL
    for (int k = 0; k < kCount; ++k) {
      PYDIST_UNROLL
      for (int v = 0; v < kValues; ++v) {
        sum[k][v] = Operation::combine(sum[k][v], values[k][v]);
      }
    }
  }

  template <typename Value, int kCount, int kValues>
  static PYDIST_DEVICE void weigh(const ReduceParams& params, std::uint32_t i,
                                  Value (&values)[kCount][kValues]) {
    if constexpr (kFamily == Family::kFloat) {
      if (params.weighs) {
        const Value factor = of_width<Value>(params.factors_32[i], params.factors[i]);
        PYDIST_UNROLL
        for (int k = 0; k < kCount; ++k) {
          PYDIST_UNROLL
          for (int v = 0; v < kValues; ++v) {
            values[k][v] = values[k][v] * factor;
          }
        }
      }
    }
  }

  // A true division: a multiplication by the reciprocal would round twice.
  template <typename Value, int kCount, int kValues>
  static PYDIST_DEVICE void divide(const ReduceParams& params, Value (&sum)[kCount][kValues]) {
    if constexpr (kFamily == Family::kFloat) {
      if (params.divides) {
        const Value divisor = of_width<Value>(params.divisor_32, params.divisor);
        PYDIST_UNROLL
        for (int k = 0; k < kCount; ++k) {
          PYDIST_UNROLL
          for (int v = 0; v < kValues; ++v) {
            sum[k][v] = sum[k][v] / divisor;
          }
        }
      }
    }
  }

  // The host has rounded already: its float64 would cost the device more.
  template <typename Value>
  static PYDIST_DEVICE Value of_width(float narrow, double wide) {
    if constexpr (std::is_same_v<Value, float>) {
      return narrow;
    } else {
      return wide;
    }
  }
};

// ---- starting it --------------------------------------------------------------------------

// A kernel as the host holds it.
struct ReduceKernel {
  // Sets `tiled` of every stretch, which depends on how much of the kernel runs at once.
  int (*launch)(ReduceParams& params, void* stream);
  int (*load)();
};

// Returns how many blocks the stretch has work for.
template <typename Unit>
std::uint64_t arrange(Stretch& stretch, std::uint64_t blocks_at_once) {
  constexpr std::uint64_t kTile = std::uint64_t{kBlockThreads} * Unit::kUnits;
  const std::uint64_t tiles = stretch.units / kTile;
  stretch.tiled = tiles < blocks_at_once ? 0 : tiles * kTile;
  return stretch.tiled != 0 ? tiles : (stretch.units + kBlockThreads - 1) / kBlockThreads;
}

template <typename Buffers>
int launch_reduction(ReduceParams& params, void* stream) {
  using Kernel = Reduction<Buffers>;
  std::uint64_t at_once = 0;
  if (const int error = blocks_at_once<Kernel>(&at_once); error != 0) {
    return error;
  }
  std::uint64_t blocks = arrange<typename Buffers::template Unit<true>>(params.aligned, at_once);
  for (Stretch& edge : params.edges) {
    const std::uint64_t wanted = arrange<typename Buffers::template Unit<false>>(edge, at_once);
    blocks = wanted > blocks ? wanted : blocks;
  }
  return launch_blocks<Kernel>(params, blocks < at_once ? blocks : at_once, stream);
}

template <typename Buffers>
inline constexpr ReduceKernel kReduceKernel = {launch_reduction<Buffers>,
                                               load_kernel<Reduction<Buffers>>};

// A kernel and the bytes of the elements it takes: a complex number may be two parts, an integer
// some bytes.
struct FoundKernel {
  const ReduceKernel* kernel;
  unsigned element_bytes;
};

// Nulls where there is none.
FoundKernel find_float_kernel(ReduceOp op, DType dtype);
FoundKernel find_integer_kernel(ReduceOp op, DType dtype);

}  // namespace pydist::cuda
