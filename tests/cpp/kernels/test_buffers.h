// Elements as kernels get them: bytes of any type at any alignment, between guards.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "kernels/cpu/convert.h"

namespace pydist::test_buffers {

using Bytes = std::vector<unsigned char>;

// A buffer that begins `skew` bytes past a multiple of 64, between guards.
class GuardedBytes {
 public:
  explicit GuardedBytes(const Bytes& contents, std::size_t skew = 0)
      : bytes_(contents.size()), storage_(contents.size() + 256, kGuard) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data()) + 64;
    offset_ = 64 + (64 - address % 64) % 64 + skew;
    std::copy(contents.begin(), contents.end(), data());
  }

  [[nodiscard]] unsigned char* data() { return storage_.data() + offset_; }
  [[nodiscard]] Bytes contents() { return {data(), data() + bytes_}; }
  [[nodiscard]] bool guards_intact() const {
    for (std::size_t i = 0; i < storage_.size(); ++i) {
      if ((i < offset_ || i >= offset_ + bytes_) && storage_[i] != kGuard) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr unsigned char kGuard = 0xa5;
  std::size_t bytes_;
  std::size_t offset_ = 0;
  Bytes storage_;
};

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

template <typename T>
std::vector<T> values_of(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return values;
}

inline Bytes narrowed(DType dtype, const std::vector<float>& values) {
  if (dtype == DType::kFloat32) {
    return bytes_of(values);
  }
  Bytes bytes(values.size() * 2);
  narrow_from_float32(dtype, values.data(), bytes.data(), values.size());
  return bytes;
}

inline std::vector<float> widened(DType dtype, const Bytes& bytes) {
  if (dtype == DType::kFloat32) {
    return values_of<float>(bytes);
  }
  std::vector<float> values(bytes.size() / 2);
  widen_to_float32(dtype, bytes.data(), values.data(), values.size());
  return values;
}

inline std::vector<float> ordinary(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

// Ordinary numbers, and every bit pattern now and then: NaN, infinities, subnormals.
inline Bytes random_elements(DType dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count * element_size(dtype));
  for (unsigned char& byte : bytes) {
    byte = random() % 4 == 0 ? 0 : static_cast<unsigned char>(random());
  }
  const std::vector<float> usual = ordinary(2 * count, seed);
  const auto keep = [&] { return random() % 8 == 0; };
  for (std::size_t i = 0; i < count; ++i) {
    const auto put = [&](auto value, std::size_t at) {
      if (!keep()) {
        std::memcpy(&bytes[at * sizeof value], &value, sizeof value);
      }
    };
    switch (dtype) {
      case DType::kFloat64:
        put(static_cast<double>(usual[i]) / 3, i);
        break;
      case DType::kComplex128:
        put(static_cast<double>(usual[2 * i]) / 3, 2 * i);
        put(static_cast<double>(usual[2 * i + 1]) / 3, 2 * i + 1);
        break;
      case DType::kFloat32:
        put(usual[i], i);
        break;
      case DType::kComplex64:
        put(usual[2 * i], 2 * i);
        put(usual[2 * i + 1], 2 * i + 1);
        break;
      case DType::kFloat16:
      case DType::kBFloat16:
        put(values_of<std::uint16_t>(narrowed(dtype, {usual[i]}))[0], i);
        break;
      default:
        break;
    }
  }
  return bytes;
}

}  // namespace pydist::test_buffers
