#include "nccl_values.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <type_traits>

namespace fake_nccl {
namespace {

float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  move_bytes(&value, &wide, 4);
  return value;
}

std::uint16_t to_bf16(float value) {
  std::uint32_t bits = 0;
  move_bytes(&bits, &value, 4);
  if (value != value) {
    return 0x7fc0;
  }
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  float value = 0;
  if (exponent == 31) {
    value = fraction != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t to_f16(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (value != value) {
    return 0x7e00;
  }
  if (magnitude >= 65520.0F) {
    return sign | 0x7c00;
  }
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int shift = std::max(exponent - 11, -24);
  // To nearest, ties to even, in units of the last place.
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, -shift)));
  if (units == 0) {
    return sign;
  }
  return static_cast<std::uint16_t>(
      sign +
      (shift == -24 ? units : units - 1024 + (static_cast<std::uint32_t>(shift + 25) << 10)));
}

// Integers wrap around.
template <typename T, typename Op>
T wrapped(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(op(static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)));
  } else {
    return op(a, b);
  }
}

template <typename T>
T combined(T a, T b, int op) {
  switch (op) {
    case kProd:
      return wrapped(a, b, std::multiplies<>());
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return wrapped(a, b, std::plus<>());
  }
}

}  // namespace

std::size_t size_of(int type) {
  constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  // A call with a type that there is not is refused later.
  return type >= 0 && type < static_cast<int>(std::size(kSizes)) ? kSizes[type] : 0;
}

void accumulate(char* total, const char* values, std::size_t count, int type, int op) {
  const auto run = [&]<typename T>(T) {
    for (std::size_t i = 0; i < count; ++i) {
      T a;
      T b;
      move_bytes(&a, total + i * sizeof(T), sizeof(T));
      move_bytes(&b, values + i * sizeof(T), sizeof(T));
      a = combined(a, b, op);
      move_bytes(total + i * sizeof(T), &a, sizeof(T));
    }
  };
  const auto run_16 = [&](auto from, auto to) {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t a = 0;
      std::uint16_t b = 0;
      move_bytes(&a, total + i * 2, 2);
      move_bytes(&b, values + i * 2, 2);
      a = to(combined(from(a), from(b), op));
      move_bytes(total + i * 2, &a, 2);
    }
  };
  switch (type) {
    case 0:
      run(std::int8_t{});
      break;
    case 1:
      run(std::uint8_t{});
      break;
    case 2:
      run(std::int32_t{});
      break;
    case 3:
      run(std::uint32_t{});
      break;
    case 4:
      run(std::int64_t{});
      break;
    case 5:
      run(std::uint64_t{});
      break;
    case 6:
      run_16(from_f16, to_f16);
      break;
    case 7:
      run(float{});
      break;
    case 8:
      run(double{});
      break;
    default:
      run_16(from_bf16, to_bf16);
      break;
  }
}

void multiply(char* values, std::size_t count, int type, double factor) {
  const auto run = [&]<typename T>(T by) {
    for (std::size_t i = 0; i < count; ++i) {
      T value;
      move_bytes(&value, values + i * sizeof(T), sizeof(T));
      value *= by;
      move_bytes(values + i * sizeof(T), &value, sizeof(T));
    }
  };
  const auto run_16 = [&](auto from, auto to) {
    const float by = from(to(static_cast<float>(factor)));
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t value = 0;
      move_bytes(&value, values + i * 2, 2);
      value = to(from(value) * by);
      move_bytes(values + i * 2, &value, 2);
    }
  };
  switch (type) {
    case 6:
      run_16(from_f16, to_f16);
      break;
    case 7:
      run(static_cast<float>(factor));
      break;
    case 8:
      run(factor);
      break;
    default:
      run_16(from_bf16, to_bf16);
      break;
  }
}

double scalar_at(const void* data, int type) {
  std::uint16_t narrow = 0;
  float single = 0;
  double value = 0;
  switch (type) {
    case 7:
      move_bytes(&single, data, sizeof single);
      return static_cast<double>(single);
    case 8:
      move_bytes(&value, data, sizeof value);
      return value;
    default:
      move_bytes(&narrow, data, sizeof narrow);
      return static_cast<double>(type == 6 ? from_f16(narrow) : from_bf16(narrow));
  }
}

}  // namespace fake_nccl
