// Vectors of one instruction set: their types, moving them, and the 16-bit conversions.
//
// Included once by each kernels_<set>.cc, which first defines exactly one of PYDIST_KERNELS_AVX512,
// PYDIST_KERNELS_AVX2, PYDIST_KERNELS_NEON and PYDIST_KERNELS_PORTABLE. The predefined macros of
// the compiler don't decide, because the portable kernels must stay what they are under
// -march=native as well. Everything has internal linkage: see Note [One definition rule and
// instruction sets].
//
// The vectors are those of the GCC and Clang vector extension. Their arithmetic is element-wise
// and rounds as the scalar operators do, so results can't differ between widths. Intrinsics stand
// only where the extension has no word for it: conversions, masks, stores around the cache.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header initialises a vector with itself where its value doesn't matter, and GCC then
// warns of it (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#endif

#if defined(PYDIST_KERNELS_NEON)
#include <arm_neon.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "which halves are even assumes it");

#define PYDIST_INLINE __attribute__((always_inline)) inline

namespace pydist::kernels {
namespace {

#if defined(PYDIST_KERNELS_AVX512)
constexpr std::size_t kVectorBytes = 64;
#elif defined(PYDIST_KERNELS_AVX2)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

template <typename Element>
struct VectorOf {
  typedef Element Type __attribute__((vector_size(kVectorBytes)));
};
template <typename Element>
using Vector = typename VectorOf<Element>::Type;

using Raw = Vector<std::uint8_t>;
using I32 = Vector<std::int32_t>;
using U32 = Vector<std::uint32_t>;
using F32 = Vector<float>;
using F64 = Vector<double>;

// The float32 accumulators of one vector of 16-bit elements.
struct Pair {
  F32 low;
  F32 high;
};

// ---- moving -------------------------------------------------------------------------------

PYDIST_INLINE Raw load(const unsigned char* from) {
  Raw raw;
  __builtin_memcpy(&raw, from, kVectorBytes);
  return raw;
}

PYDIST_INLINE void store(unsigned char* to, Raw raw) { __builtin_memcpy(to, &raw, kVectorBytes); }

// `to` is aligned to kVectorBytes.
PYDIST_INLINE void store_streaming(unsigned char* to, Raw raw) {
#if defined(PYDIST_KERNELS_AVX512)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)raw);
#elif defined(PYDIST_KERNELS_AVX2)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)raw);
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)raw);
#else
  store(to, raw);
#endif
}

// Orders the streaming stores before every later store, as ordinary stores are.
PYDIST_INLINE void streaming_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The first `bytes` (< kVectorBytes) of a vector; the rest is zero.
PYDIST_INLINE Raw load_partial(const unsigned char* from, std::size_t bytes) {
#if defined(PYDIST_KERNELS_AVX512)
  return (Raw)_mm512_maskz_loadu_epi8((std::uint64_t{1} << bytes) - 1, from);
#else
  Raw raw = {};
  __builtin_memcpy(&raw, from, bytes);
  return raw;
#endif
}

PYDIST_INLINE void store_partial(unsigned char* to, Raw raw, std::size_t bytes) {
#if defined(PYDIST_KERNELS_AVX512)
  _mm512_mask_storeu_epi8(to, (std::uint64_t{1} << bytes) - 1, (__m512i)raw);
#else
  __builtin_memcpy(to, &raw, bytes);
#endif
}

// ---- choosing -----------------------------------------------------------------------------

// Note [Canonical NaN]
// Which of two NaNs an addition returns depends on the order of its operands, which compilers
// swap at will, and the sign of a fresh NaN differs between x86 and Arm. So that a result depends
// on the values alone, every NaN that a kernel stores is the positive quiet one without payload.
// It costs nothing measurable: the loops wait for memory or for the store port.
PYDIST_INLINE F32 canonical(F32 value) {
#if defined(PYDIST_KERNELS_AVX512)
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
  return (F32)_mm512_mask_mov_ps((__m512)value, is_nan, _mm512_set1_ps(__builtin_nanf("")));
#else
  return value != value ? F32{} + __builtin_nanf("") : value;
#endif
}

PYDIST_INLINE F64 canonical(F64 value) {
#if defined(PYDIST_KERNELS_AVX512)
  const __mmask8 is_nan = _mm512_cmp_pd_mask((__m512d)value, (__m512d)value, _CMP_UNORD_Q);
  return (F64)_mm512_mask_mov_pd((__m512d)value, is_nan, _mm512_set1_pd(__builtin_nan("")));
#else
  return value != value ? F64{} + __builtin_nan("") : value;
#endif
}

PYDIST_INLINE Pair canonical(Pair pair) { return {canonical(pair.low), canonical(pair.high)}; }

// ---- rounded once -------------------------------------------------------------------------
// What the vector extension has no operator for.

// a * b + c, correctly rounded.
PYDIST_INLINE F32 fused(F32 a, F32 b, F32 c) {
#if defined(PYDIST_KERNELS_AVX512)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(PYDIST_KERNELS_AVX2)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(PYDIST_KERNELS_NEON)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  // In float64 the product is exact and the sum's error is known. Rounding the sum to odd (Boldo
  // and Melquiond, 2008), that is, away from an even last bit wherever the sum isn't exact, makes
  // the second rounding, to float32, the only one that counts.
  typedef double Doubles __attribute__((vector_size(2 * kVectorBytes)));
  typedef std::int64_t Bits __attribute__((vector_size(2 * kVectorBytes)));
  const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
  const Doubles addend = __builtin_convertvector(c, Doubles);
  const Doubles sum = product + addend;
  const Doubles rest = sum - product;
  const Doubles error = (product - (sum - rest)) + (addend - rest);
  // Masks are -1 where true. An infinite or NaN sum has a NaN for an error, and stays.
  const Bits is_larger = (Bits)((error > 0.0) == (sum > 0.0));
  const Bits moves = (Bits)((error > 0.0) | (error < 0.0)) & (((Bits)sum & 1) - 1);
  const Bits odd = (Bits)sum + (moves & (-2 * is_larger - 1));
  return __builtin_convertvector((Doubles)odd, F32);
#endif
}

PYDIST_INLINE F64 fused(F64 a, F64 b, F64 c) {
#if defined(PYDIST_KERNELS_AVX512)
  return (F64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(PYDIST_KERNELS_AVX2)
  return (F64)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(PYDIST_KERNELS_NEON)
  return (F64)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return F64{__builtin_fma(a[0], b[0], c[0]), __builtin_fma(a[1], b[1], c[1])};
#endif
}

PYDIST_INLINE F32 root(F32 value) {
#if defined(PYDIST_KERNELS_AVX512)
  return (F32)_mm512_sqrt_ps((__m512)value);
#elif defined(PYDIST_KERNELS_AVX2)
  return (F32)_mm256_sqrt_ps((__m256)value);
#elif defined(__x86_64__)
  return (F32)_mm_sqrt_ps((__m128)value);
#elif defined(PYDIST_KERNELS_NEON)
  return (F32)vsqrtq_f32((float32x4_t)value);
#else
  return F32{__builtin_sqrtf(value[0]), __builtin_sqrtf(value[1]), __builtin_sqrtf(value[2]),
             __builtin_sqrtf(value[3])};
#endif
}

PYDIST_INLINE F64 root(F64 value) {
#if defined(PYDIST_KERNELS_AVX512)
  return (F64)_mm512_sqrt_pd((__m512d)value);
#elif defined(PYDIST_KERNELS_AVX2)
  return (F64)_mm256_sqrt_pd((__m256d)value);
#elif defined(__x86_64__)
  return (F64)_mm_sqrt_pd((__m128d)value);
#elif defined(PYDIST_KERNELS_NEON)
  return (F64)vsqrtq_f64((float64x2_t)value);
#else
  return F64{__builtin_sqrt(value[0]), __builtin_sqrt(value[1])};
#endif
}

// ---- bfloat16 -----------------------------------------------------------------------------
// Its bits are the upper half of a float32. A Pair holds the even elements low and the odd ones
// high: a shift or a mask takes them apart, and nothing in between depends on the order.

PYDIST_INLINE Pair widen_to_upper_halves(Raw raw) {
  return {(F32)((U32)raw << 16), (F32)((U32)raw & 0xffff0000u)};
}

PYDIST_INLINE Raw narrow_upper_halves(U32 low, U32 high) {
  return (Raw)((low >> 16) | (high & 0xffff0000u));
}

// Round to nearest, ties to even; a canonical NaN stays one, too large a value becomes infinite.
PYDIST_INLINE U32 round_to_upper_half(F32 value) {
  const U32 bits = (U32)value;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// ---- float16 ------------------------------------------------------------------------------
// A Pair holds the first half of the elements low and the second high, or, without conversions of
// the hardware, the even ones low and the odd ones high.

#if defined(PYDIST_KERNELS_PORTABLE)
constexpr bool kFloat16IsEvenOdd = true;
#else
constexpr bool kFloat16IsEvenOdd = false;
#endif

#if defined(PYDIST_KERNELS_AVX512)

PYDIST_INLINE Pair widen_float16(Raw raw) {
  const __m512i bits = (__m512i)raw;
  return {(F32)_mm512_cvtph_ps(_mm512_castsi512_si256(bits)),
          (F32)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
}

PYDIST_INLINE Raw narrow_float16(Pair pair) {
  const __m256i low = _mm512_cvtps_ph((__m512)pair.low, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_cvtps_ph((__m512)pair.high, _MM_FROUND_TO_NEAREST_INT);
  return (Raw)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

#elif defined(PYDIST_KERNELS_AVX2)

PYDIST_INLINE Pair widen_float16(Raw raw) {
  const __m256i bits = (__m256i)raw;
  return {(F32)_mm256_cvtph_ps(_mm256_castsi256_si128(bits)),
          (F32)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
}

PYDIST_INLINE Raw narrow_float16(Pair pair) {
  const __m128i low = _mm256_cvtps_ph((__m256)pair.low, _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph((__m256)pair.high, _MM_FROUND_TO_NEAREST_INT);
  return (Raw)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

#elif defined(PYDIST_KERNELS_NEON)

PYDIST_INLINE Pair widen_float16(Raw raw) {
  const float16x8_t halves = (float16x8_t)raw;
  return {(F32)vcvt_f32_f16(vget_low_f16(halves)), (F32)vcvt_high_f32_f16(halves)};
}

PYDIST_INLINE Raw narrow_float16(Pair pair) {
  return (Raw)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)pair.low), (float32x4_t)pair.high);
}

#else

PYDIST_INLINE F32 as_float(U32 bits) { return (F32)bits; }

// `half` lies in the upper half of each element.
PYDIST_INLINE F32 widen_float16_bits(U32 half) {
  constexpr std::uint32_t kRebias = (127u - 15u) << 23;
  const U32 sign = half & 0x80000000u;
  const U32 magnitude = (half & 0x7fff0000u) >> 3;
  const U32 exponent = magnitude & (0x1fu << 23);
  // Infinity and NaN have the largest exponent in both formats, so theirs moves twice.
  const U32 normal = magnitude + kRebias + ((U32)(exponent == 0x1fu << 23) & kRebias);
  // A subnormal gets an implicit one, which the subtraction takes away again: exact.
  const U32 smallest_normal = U32{} + (113u << 23);
  const U32 subnormal = (U32)(as_float(magnitude + smallest_normal) - as_float(smallest_normal));
  return as_float((exponent == 0u ? subnormal : normal) | sign);
}

// The result lies in the upper half of each element. Round to nearest, ties to even.
PYDIST_INLINE U32 narrow_float16_bits(F32 value) {
  const U32 sign = (U32)value & 0x80000000u;
  const U32 magnitude = (U32)value ^ sign;
  // Signed comparisons are the cheap ones, and a magnitude is never negative.
  const I32 ordered = (I32)magnitude;
  const U32 normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 shifts the last bit of a float16 subnormal into the last bit of the sum, and the
  // addition rounds as it should.
  const U32 half = U32{} + (126u << 23);
  const U32 subnormal = (U32)(as_float(magnitude) + as_float(half)) - half;
  const U32 special = ordered > 0x7f800000 ? U32{} + 0x7e00u : U32{} + 0x7c00u;
  const U32 finite = ordered < 113 << 23 ? subnormal : normal;
  return (((ordered >= 143 << 23) ? special : finite) << 16) | sign;
}

PYDIST_INLINE Pair widen_float16(Raw raw) {
  const Pair halves = widen_to_upper_halves(raw);
  return {widen_float16_bits((U32)halves.low), widen_float16_bits((U32)halves.high)};
}

PYDIST_INLINE Raw narrow_float16(Pair pair) {
  return narrow_upper_halves(narrow_float16_bits(pair.low), narrow_float16_bits(pair.high));
}

#endif

}  // namespace
}  // namespace pydist::kernels
