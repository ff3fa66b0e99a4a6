// Elements as the CUDA kernels see them: how they lie in memory and in arithmetic, and how two of
// them combine.
//
// Everything here is for the device and for the host alike, so that the C++ tests can compare the
// kernels with kernels/cpu/reduce.h bit by bit where there is no device. The promises are those of
// kernels/cpu/reduce.h, NaN included: see Note [Canonical NaN] in kernels/cpu/simd.inc.h.

#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYDIST_DEVICE __host__ __device__ __forceinline__
#define PYDIST_UNROLL _Pragma("unroll")
#define PYDIST_NO_UNROLL _Pragma("unroll 1")
#else
#define PYDIST_DEVICE inline
#define PYDIST_UNROLL
#define PYDIST_NO_UNROLL
#endif

namespace pydist::cuda {

// ---- bits ---------------------------------------------------------------------------------

template <typename To, typename From>
PYDIST_DEVICE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// What one thread moves at a time.
struct alignas(16) Words {
  std::uint32_t word[4];
};

PYDIST_DEVICE float quiet_nan(float) { return bits_as<float>(std::uint32_t{0x7fc00000}); }
PYDIST_DEVICE double quiet_nan(double) {
  return bits_as<double>(std::uint64_t{0x7ff8000000000000});
}

template <typename T>
PYDIST_DEVICE T canonical(T value) {
  return value != value ? quiet_nan(value) : value;
}

// ---- 16-bit floating point ----------------------------------------------------------------

PYDIST_DEVICE float widen_bfloat16(std::uint32_t half) { return bits_as<float>(half << 16); }

// To nearest, ties to even. The conversion of the hardware is not used: its NaN is another one.
PYDIST_DEVICE std::uint32_t narrow_bfloat16(float value) {
  const auto bits = bits_as<std::uint32_t>(canonical(value));
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

PYDIST_DEVICE float widen_float16(std::uint32_t half) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(half)));
  return value;
#else
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = (half & 0x7fffu) << 13;
  const std::uint32_t exponent = magnitude & 0x0f800000u;
  if (exponent == 0) {
    // A subnormal gets an implicit one, which the subtraction takes away again: exact.
    const float smallest_normal = bits_as<float>(std::uint32_t{113} << 23);
    const float subnormal = bits_as<float>(magnitude + (113u << 23)) - smallest_normal;
    return bits_as<float>(bits_as<std::uint32_t>(subnormal) | sign);
  }
  const std::uint32_t rebias = (127u - 15u) << 23;
  // Infinity and NaN have the largest exponent in both formats, so theirs moves twice.
  return bits_as<float>((magnitude + rebias + (exponent == 0x0f800000u ? rebias : 0u)) | sign);
#endif
}

PYDIST_DEVICE std::uint32_t narrow_float16(float value) {
#if defined(__CUDA_ARCH__)
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return value != value ? 0x7e00u : half;
#else
  const auto bits = bits_as<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return 0x7e00u;
  }
  if (magnitude >= 143u << 23) {
    return sign | 0x7c00u;
  }
  if (magnitude < 113u << 23) {
    // Adding 0.5 shifts the last bit of a float16 subnormal into the last bit of the sum, and the
    // addition rounds as it should.
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return sign | (bits_as<std::uint32_t>(shifted) - (126u << 23));
  }
  return sign | ((magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
#endif
}

// The nearest float32, or where none is exact the neighbour with an odd last bit: another rounding
// after this one, to 16 bits, then is as good as one rounding of the float64.
PYDIST_DEVICE float to_float32_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value) {
    return nearest;
  }
  auto bits = bits_as<std::uint32_t>(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double reached = nearest < 0 ? -static_cast<double>(nearest) : nearest;
  bits -= reached > magnitude ? 1u : 0u;
  return bits_as<float>(bits | 1u);
}

// ---- formats ------------------------------------------------------------------------------
// A format says how elements lie in memory (Storage, and kLanes of them in Words) and in arithmetic
// (Value, and kValues of them for Words), and which operations it takes.

enum class Family { kFloat, kComplex, kInteger, kBits };

template <typename T>
constexpr bool kIsFloat = false;
template <>
inline constexpr bool kIsFloat<float> = true;
template <>
inline constexpr bool kIsFloat<double> = true;

// For formats whose elements lie in memory as they are in arithmetic.
template <typename Format, int kValues>
PYDIST_DEVICE Words pack_each(const typename Format::Value (&values)[kValues]) {
  typename Format::Value packed[kValues];
  PYDIST_UNROLL
  for (int k = 0; k < kValues; ++k) {
    packed[k] = Format::pack(values[k]);
  }
  Words words;
  __builtin_memcpy(&words, packed, sizeof words);
  return words;
}

template <typename T>
struct Plain {
  using Storage = T;
  using Value = T;
  static constexpr Family kFamily = kIsFloat<T> ? Family::kFloat : Family::kInteger;
  static constexpr int kLanes = 16 / sizeof(T);
  static constexpr int kValues = kLanes;

  static PYDIST_DEVICE Value unpack(Storage stored) { return stored; }
  static PYDIST_DEVICE Storage pack(Value value) {
    if constexpr (kIsFloat<T>) {
      return canonical(value);
    } else {
      return value;
    }
  }
  static PYDIST_DEVICE void unpack(const Words& words, Value (&values)[kValues]) {
    __builtin_memcpy(values, &words, sizeof words);
  }
  static PYDIST_DEVICE Words pack(const Value (&values)[kValues]) {
    return pack_each<Plain>(values);
  }
};

// Both 16-bit floating-point types.
template <float (*kWiden)(std::uint32_t), std::uint32_t (*kNarrow)(float)>
struct Half {
  using Storage = std::uint16_t;
  using Value = float;
  static constexpr Family kFamily = Family::kFloat;
  static constexpr int kLanes = 8;
  static constexpr int kValues = 8;

  static PYDIST_DEVICE Value unpack(Storage stored) { return kWiden(stored); }
  static PYDIST_DEVICE Storage pack(Value value) { return static_cast<Storage>(kNarrow(value)); }
  static PYDIST_DEVICE void unpack(const Words& words, Value (&values)[kValues]) {
    PYDIST_UNROLL
    for (int k = 0; k < kValues; ++k) {
      values[k] = kWiden(k % 2 == 0 ? words.word[k / 2] & 0xffffu : words.word[k / 2] >> 16);
    }
  }
  static PYDIST_DEVICE Words pack(const Value (&values)[kValues]) {
    Words words;
    PYDIST_UNROLL
    for (int k = 0; k < 4; ++k) {
      words.word[k] = kNarrow(values[2 * k]) | kNarrow(values[2 * k + 1]) << 16;
    }
    return words;
  }
};
using Float16 = Half<widen_float16, narrow_float16>;
using BFloat16 = Half<widen_bfloat16, narrow_bfloat16>;

// Bytes of which only the bits matter: four at a time are as good as one.
struct Bits {
  using Storage = std::uint8_t;
  using Value = std::uint32_t;
  static constexpr Family kFamily = Family::kBits;
  static constexpr int kLanes = 16;
  static constexpr int kValues = 4;

  static PYDIST_DEVICE Value unpack(Storage stored) { return stored; }
  static PYDIST_DEVICE Storage pack(Value value) { return static_cast<Storage>(value); }
  static PYDIST_DEVICE void unpack(const Words& words, Value (&values)[kValues]) {
    __builtin_memcpy(values, &words, sizeof words);
  }
  static PYDIST_DEVICE Words pack(const Value (&values)[kValues]) {
    Words words;
    __builtin_memcpy(&words, values, sizeof words);
    return words;
  }
};

// One byte, of which any value but zero is true.
struct Bool : Bits {
  // In each byte 1 where there was any bit, else 0.
  static PYDIST_DEVICE Value truth(Value bytes) {
    return ((((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7) & 0x01010101u;
  }
  static PYDIST_DEVICE Value unpack(Storage stored) { return truth(stored); }
  static PYDIST_DEVICE void unpack(const Words& words, Value (&values)[kValues]) {
    PYDIST_UNROLL
    for (int k = 0; k < kValues; ++k) {
      values[k] = truth(words.word[k]);
    }
  }
  using Bits::pack;
};

// Only the product needs to know of complex numbers; everything else takes their parts alone.
template <typename T>
struct Complex {
  struct Storage {
    T real;
    T imaginary;
  };
  using Value = Storage;
  static constexpr Family kFamily = Family::kComplex;
  static constexpr int kLanes = 16 / sizeof(Storage);
  static constexpr int kValues = kLanes;

  static PYDIST_DEVICE Value unpack(Storage stored) { return stored; }
  static PYDIST_DEVICE Storage pack(Value value) {
    return {canonical(value.real), canonical(value.imaginary)};
  }
  static PYDIST_DEVICE void unpack(const Words& words, Value (&values)[kValues]) {
    __builtin_memcpy(values, &words, sizeof words);
  }
  static PYDIST_DEVICE Words pack(const Value (&values)[kValues]) {
    return pack_each<Complex>(values);
  }
};

// ---- operations ---------------------------------------------------------------------------
// The device code is compiled without fused multiply-adds, as the kernels of the CPU are.

struct Sum {
  template <typename Value>
  static PYDIST_DEVICE Value combine(Value a, Value b) {
    return static_cast<Value>(a + b);
  }
};

struct Product {
  static PYDIST_DEVICE float combine(float a, float b) { return a * b; }
  static PYDIST_DEVICE double combine(double a, double b) { return a * b; }
  // Narrow operands of * would become int, and overflow.
  static PYDIST_DEVICE std::uint8_t combine(std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(std::uint32_t{a} * b);
  }
  static PYDIST_DEVICE std::uint16_t combine(std::uint16_t a, std::uint16_t b) {
    return static_cast<std::uint16_t>(std::uint32_t{a} * b);
  }
  static PYDIST_DEVICE std::uint32_t combine(std::uint32_t a, std::uint32_t b) { return a * b; }
  static PYDIST_DEVICE std::uint64_t combine(std::uint64_t a, std::uint64_t b) { return a * b; }
  // The plain formula, without recovery of infinities.
  template <typename T>
  static PYDIST_DEVICE auto combine(T a, T b) -> decltype(T{a.real, a.imaginary}) {
    return {a.real * b.real - a.imaginary * b.imaginary,
            a.imaginary * b.real + a.real * b.imaginary};
  }
};

// The first of equal values stays, which matters for zeros of different sign. Integers come
// unsigned, as `Ordered` they are compared.
template <typename Ordered>
struct Minimum {
  template <typename Value>
  static PYDIST_DEVICE Value combine(Value a, Value b) {
    return static_cast<Ordered>(b) < static_cast<Ordered>(a) || b != b ? b : a;
  }
};

template <typename Ordered>
struct Maximum {
  template <typename Value>
  static PYDIST_DEVICE Value combine(Value a, Value b) {
    return static_cast<Ordered>(b) > static_cast<Ordered>(a) || b != b ? b : a;
  }
};

struct And {
  template <typename Value>
  static PYDIST_DEVICE Value combine(Value a, Value b) {
    return a & b;
  }
};

struct Or {
  template <typename Value>
  static PYDIST_DEVICE Value combine(Value a, Value b) {
    return a | b;
  }
};

struct Xor {
  template <typename Value>
  static PYDIST_DEVICE Value combine(Value a, Value b) {
    return a ^ b;
  }
};

}  // namespace pydist::cuda
