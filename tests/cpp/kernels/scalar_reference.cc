#include "kernels/scalar_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>
#include <type_traits>

#include "kernels/one_rounding.h"

namespace pydist::scalar {
namespace {

template <typename T>
T canonical(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <typename T>
T reference_float(const Reduction& reduction, const std::vector<T>& values) {
  T result = values[0];
  switch (reduction.op) {
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      for (const T value : values) {
        const bool better = reduction.op == ReduceOp::kMin ? value < result : value > result;
        if (std::isnan(result) || std::isnan(value)) {
          result = std::numeric_limits<T>::quiet_NaN();
        } else if (better) {
          result = value;
        }
      }
      return result;
    case ReduceOp::kProd:
      for (std::size_t i = 1; i < values.size(); ++i) {
        result = multiply(result, values[i]);
      }
      return result;
    case ReduceOp::kPremulSum:
      result = multiply(values[0], static_cast<T>(reduction.factors[0]));
      for (std::size_t i = 1; i < values.size(); ++i) {
        result = add(result, multiply(values[i], static_cast<T>(reduction.factors[i])));
      }
      return result;
    default:
      for (std::size_t i = 1; i < values.size(); ++i) {
        result = add(result, values[i]);
      }
      return reduction.op == ReduceOp::kMean ? divide(result, static_cast<T>(reduction.divisor))
                                             : result;
  }
}

template <typename T>
void reference_complex(const Reduction& reduction, const std::vector<const unsigned char*>& inputs,
                       unsigned char* output) {
  std::vector<T> real, imaginary;
  for (const unsigned char* input : inputs) {
    real.push_back(read<T>(input));
    imaginary.push_back(read<T>(input + sizeof(T)));
  }
  T re = real[0], im = imaginary[0];
  if (reduction.op == ReduceOp::kProd) {
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      const T next_re = add(multiply(re, real[i]), -multiply(im, imaginary[i]));
      im = add(multiply(re, imaginary[i]), multiply(im, real[i]));
      re = next_re;
    }
  } else {
    re = reference_float(reduction, real);
    im = reference_float(reduction, imaginary);
  }
  write(output, canonical(re));
  write(output + sizeof(T), canonical(im));
}

// Modulo 2^64, of which the last cast takes as many bits as there are.
template <typename T>
T reference_integer(ReduceOp op, const std::vector<T>& values) {
  using Wide = std::uint64_t;
  T result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) {
    const T value = values[i];
    switch (op) {
      case ReduceOp::kSum:
        result = static_cast<T>(static_cast<Wide>(result) + static_cast<Wide>(value));
        break;
      case ReduceOp::kProd:
        result = static_cast<T>(static_cast<Wide>(result) * static_cast<Wide>(value));
        break;
      case ReduceOp::kMin:
        result = std::min(result, value);
        break;
      case ReduceOp::kMax:
        result = std::max(result, value);
        break;
      case ReduceOp::kBand:
        result = static_cast<T>(result & value);
        break;
      case ReduceOp::kBor:
        result = static_cast<T>(result | value);
        break;
      default:
        result = static_cast<T>(result ^ value);
        break;
    }
  }
  return result;
}

bool reference_bool(ReduceOp op, const std::vector<bool>& values) {
  bool any = false, all = true, odd = false;
  for (const bool value : values) {
    any = any || value;
    all = all && value;
    odd = odd != value;
  }
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return any;
    case ReduceOp::kBxor:
      return odd;
    default:
      return all;
  }
}

void reference_element(const Reduction& reduction, const std::vector<const unsigned char*>& inputs,
                       unsigned char* output) {
  const auto all = [&]<typename T>(T) {
    std::vector<T> values;
    for (const unsigned char* input : inputs) {
      values.push_back(read<T>(input));
    }
    return values;
  };
  const auto half = [&](HalfFormat format) {
    std::vector<float> values;
    for (const unsigned char* input : inputs) {
      values.push_back(decode(read<std::uint16_t>(input), format));
    }
    write(output, encode(reference_float(reduction, values), format));
  };
  const auto integer = [&]<typename T>(T zero) {
    write(output, reference_integer<T>(reduction.op, all(zero)));
  };
  switch (reduction.dtype) {
    case DType::kFloat64:
      return write(output, canonical(reference_float(reduction, all(double{}))));
    case DType::kFloat32:
      return write(output, canonical(reference_float(reduction, all(float{}))));
    case DType::kFloat16:
      return half(kFloat16Format);
    case DType::kBFloat16:
      return half(kBFloat16Format);
    case DType::kInt8:
      return integer(std::int8_t{});
    case DType::kInt16:
      return integer(std::int16_t{});
    case DType::kInt32:
      return integer(std::int32_t{});
    case DType::kInt64:
      return integer(std::int64_t{});
    case DType::kUInt8:
      return integer(std::uint8_t{});
    case DType::kUInt16:
      return integer(std::uint16_t{});
    case DType::kUInt32:
      return integer(std::uint32_t{});
    case DType::kUInt64:
      return integer(std::uint64_t{});
    case DType::kBool: {
      std::vector<bool> values;
      for (const unsigned char* input : inputs) {
        values.push_back(*input != 0);
      }
      *output = reference_bool(reduction.op, values) ? 1 : 0;
      return;
    }
    case DType::kComplex64:
      return reference_complex<float>(reduction, inputs, output);
    case DType::kComplex128:
      return reference_complex<double>(reduction, inputs, output);
    case DType::kFloat8:
      break;
  }
  FAIL() << "no reference for " << to_string(reduction.dtype);
}

}  // namespace

float decode(std::uint16_t bits, HalfFormat format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int largest = (1 << format.exponent_bits) - 1;
  double magnitude;
  if (exponent == largest) {
    magnitude = mantissa != 0 ? std::nan("") : HUGE_VAL;
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, format.smallest_exponent - format.mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1 << format.mantissa_bits),
                           format.smallest_exponent + exponent - 1 - format.mantissa_bits);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

std::uint16_t encode(float value, HalfFormat format) {
  const int infinity = ((1 << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isnan(value)) {
    return static_cast<std::uint16_t>(infinity | (1 << (format.mantissa_bits - 1)));
  }
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  int bits = infinity;
  if (magnitude == 0) {
    bits = 0;
  } else if (std::isfinite(magnitude)) {
    const int exponent = std::max(std::ilogb(magnitude), format.smallest_exponent);
    // nearbyint() rounds ties to even. The carry of a rounded-up mantissa moves the exponent.
    const int steps =
        static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
    bits =
        std::min(infinity, ((exponent - format.smallest_exponent) << format.mantissa_bits) + steps);
  }
  return static_cast<std::uint16_t>(sign | bits);
}

Bytes reference(const Reduction& reduction, const std::vector<Bytes>& inputs, std::size_t count) {
  const std::size_t size = element_size(reduction.dtype);
  Bytes result(count * size);
  std::vector<const unsigned char*> at(inputs.size());
  for (std::size_t e = 0; e < count; ++e) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      at[i] = inputs[i].data() + e * size;
    }
    reference_element(reduction, at, result.data() + e * size);
  }
  return result;
}

}  // namespace pydist::scalar
