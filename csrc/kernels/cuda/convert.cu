// Conversion, packing and unpacking: many segments, each from one buffer to another.

#include <cstdint>

#include "base/dtype.h"
#include "kernels/cuda/arguments.h"
#include "kernels/cuda/module.h"
#include "kernels/cuda/segments.h"

namespace pydist::cuda {
namespace {

struct ConvertSegment {
  const void* from;
  void* to;
  std::uint64_t count;
  std::uint32_t first_tile;
  DType from_dtype;
  DType to_dtype;
  // Of an element that is copied bit for bit; 0 where values are converted.
  std::uint8_t copied_bytes;
};

struct ConvertShared {
  double scale;
  const double* device_scale;    // null for none
  const double* device_divisor;  // null for none
  bool scales;
};

struct Convert {
  using Params = SegmentTable<ConvertSegment, ConvertShared>;

  static PYDIST_DEVICE void run(const Params& params, Place place) {
    const double given = given_scale(params.shared);
    const double scale = params.shared.scale * given;
    PYDIST_NO_UNROLL
    for (auto tile = static_cast<std::uint32_t>(place.block); tile < params.tiles;
         tile += static_cast<std::uint32_t>(place.blocks)) {
      const ConvertSegment& segment = params.segments[params.segment_of(tile)];
      const std::uint64_t first = std::uint64_t{tile - segment.first_tile} * kTileElements;
      const std::uint64_t left = segment.count - first;
      const unsigned count = left < kTileElements ? static_cast<unsigned>(left) : kTileElements;
      if (given == 0) {
        clear(segment, first, count, place.thread);
      } else if (segment.copied_bytes != 0) {
        copy(segment, first, count, place.thread);
      } else if (segment.from_dtype == DType::kFloat64 || segment.to_dtype == DType::kFloat64) {
        convert<double>(segment, first, count, params.shared.scales, scale, place.thread);
      } else {
        convert<float>(segment, first, count, params.shared.scales, static_cast<float>(scale),
                       place.thread);
      }
    }
  }

 private:
  static PYDIST_DEVICE double given_scale(const ConvertShared& shared) {
    if (shared.device_scale == nullptr) {
      return 1.0;
    }
    const double divisor = shared.device_divisor == nullptr ? 1.0 : *shared.device_divisor;
    return divisor == 0 ? 0.0 : *shared.device_scale / divisor;
  }

  template <typename Value>
  static PYDIST_DEVICE void convert(const ConvertSegment& segment, std::uint64_t first,
                                    unsigned count, bool scales, Value scale, unsigned thread) {
    if (count == kTileElements && is_group_aligned(segment.from, float_bytes(segment.from_dtype)) &&
        is_group_aligned(segment.to, float_bytes(segment.to_dtype))) {
      several<kGroup, kTileGroups>(segment, first + thread * kGroup, scales, scale);
      return;
    }
    unsigned element = thread;
    PYDIST_NO_UNROLL
    for (; element + 3 * kBlockThreads < count; element += 4 * kBlockThreads) {
      several<1, 4>(segment, first + element, scales, scale);
    }
    PYDIST_NO_UNROLL
    for (; element < count; element += kBlockThreads) {
      several<1, 1>(segment, first + element, scales, scale);
    }
  }

  // kCount groups of kWidth elements. The choice of dtype stands outside of the loop over groups,
  // so that all of their loads are on the way before the first is used.
  template <int kWidth, int kCount, typename Value>
  static PYDIST_DEVICE void several(const ConvertSegment& segment, std::uint64_t element,
                                    bool scales, Value scale) {
    constexpr std::uint64_t kStep = std::uint64_t{kBlockThreads} * kWidth;
    Value values[kCount][kWidth] = {};
    switch (segment.from_dtype) {
      case DType::kFloat64:
        if constexpr (std::is_same_v<Value, double>) {
          load<kWidth, kCount>(segment, DType::kFloat64, element, values);
        }
        break;
      case DType::kFloat32:
        load<kWidth, kCount>(segment, DType::kFloat32, element, values);
        break;
      case DType::kFloat16:
        load<kWidth, kCount>(segment, DType::kFloat16, element, values);
        break;
      default:
        load<kWidth, kCount>(segment, DType::kBFloat16, element, values);
        break;
    }
    if (scales) {
      PYDIST_UNROLL
      for (int k = 0; k < kCount; ++k) {
        PYDIST_UNROLL
        for (int v = 0; v < kWidth; ++v) {
          values[k][v] = values[k][v] * scale;
        }
      }
    }
    PYDIST_UNROLL
    for (int k = 0; k < kCount; ++k) {
      store_group<kWidth>(segment.to, element + k * kStep, segment.to_dtype, values[k]);
    }
  }

  template <int kWidth, int kCount, typename Value>
  static PYDIST_DEVICE void load(const ConvertSegment& segment, DType dtype, std::uint64_t element,
                                 Value (&values)[kCount][kWidth]) {
    constexpr std::uint64_t kStep = std::uint64_t{kBlockThreads} * kWidth;
    RawGroup raw[kCount];
    PYDIST_UNROLL
    for (int k = 0; k < kCount; ++k) {
      raw[k] = load_group<kWidth>(segment.from, element + k * kStep, float_bytes(dtype));
    }
    PYDIST_UNROLL
    for (int k = 0; k < kCount; ++k) {
      widen_group<kWidth>(dtype, raw[k], values[k]);
    }
  }

  static PYDIST_DEVICE void clear(const ConvertSegment& segment, std::uint64_t first,
                                  unsigned count, unsigned thread) {
    const float zero[1] = {};
    PYDIST_NO_UNROLL
    for (unsigned element = thread; element < count; element += kBlockThreads) {
      store_group<1>(segment.to, first + element, segment.to_dtype, zero);
    }
  }

  // Whatever the elements are: bytes, as many at a time as both buffers are aligned to.
  static PYDIST_DEVICE void copy(const ConvertSegment& segment, std::uint64_t first, unsigned count,
                                 unsigned thread) {
    const unsigned char* const from = at(segment.from, first * segment.copied_bytes);
    unsigned char* const to = at(segment.to, first * segment.copied_bytes);
    const unsigned bytes = count * segment.copied_bytes;
    const auto addresses = bits_as<std::uint64_t>(from) | bits_as<std::uint64_t>(to);
    unsigned done = 0;
    if (addresses % 16 == 0) {
      done = copy_units<16>(from, to, bytes, thread);
    } else if (addresses % 4 == 0) {
      done = copy_units<4>(from, to, bytes, thread);
    } else if (addresses % 2 == 0) {
      done = copy_units<2>(from, to, bytes, thread);
    }
    PYDIST_NO_UNROLL
    for (unsigned byte = done + thread; byte < bytes; byte += kBlockThreads) {
      store_1(to + byte, load_1(from + byte));
    }
  }

  // Returns how many bytes are in whole units.
  template <unsigned kBytes>
  static PYDIST_DEVICE unsigned copy_units(const unsigned char* from, unsigned char* to,
                                           unsigned bytes, unsigned thread) {
    const unsigned units = bytes / kBytes;
    unsigned unit = thread;
    PYDIST_NO_UNROLL
    for (; unit + 3 * kBlockThreads < units; unit += 4 * kBlockThreads) {
      copy_several<kBytes, 4>(from + unit * kBytes, to + unit * kBytes);
    }
    PYDIST_NO_UNROLL
    for (; unit < units; unit += kBlockThreads) {
      copy_several<kBytes, 1>(from + unit * kBytes, to + unit * kBytes);
    }
    return units * kBytes;
  }

  template <unsigned kBytes, int kCount>
  static PYDIST_DEVICE void copy_several(const unsigned char* from, unsigned char* to) {
    constexpr unsigned kStep = kBlockThreads * kBytes;
    Words words[kCount];
    PYDIST_UNROLL
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kBytes == 16) {
        words[k] = load_16(from + k * kStep);
      } else {
        words[k].word[0] = kBytes == 4 ? load_4(from + k * kStep) : load_2(from + k * kStep);
      }
    }
    PYDIST_UNROLL
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kBytes == 16) {
        store_16(to + k * kStep, words[k]);
      } else if constexpr (kBytes == 4) {
        store_4(to + k * kStep, words[k].word[0]);
      } else {
        store_2(to + k * kStep, words[k].word[0]);
      }
    }
  }
};

}  // namespace

int load_convert_kernels() { return load_kernel<Convert>(); }

}  // namespace pydist::cuda

int pydist_cuda_convert(const PydistCudaConvert* convert, void* stream) {
  using namespace pydist;
  using namespace pydist::cuda;
  if (convert == nullptr || !fault_in(*convert).empty()) {
    return kInvalidValue;
  }
  Convert::Params table = {};
  table.shared.scale = convert->scale;
  table.shared.device_scale = convert->device_scale;
  table.shared.device_divisor = convert->device_divisor;
  table.shared.scales = convert->scale != 1.0 || convert->device_scale != nullptr;
  return for_each_table(
      convert->segments, convert->segment_count, table,
      [&](const PydistCudaSegment& given) {
        ConvertSegment entry = {};
        entry.from = given.from;
        entry.to = given.to;
        entry.count = given.count;
        entry.from_dtype = given.from_dtype;
        entry.to_dtype = given.to_dtype;
        if (given.from_dtype == given.to_dtype && !table.shared.scales) {
          entry.copied_bytes = static_cast<std::uint8_t>(element_size(given.from_dtype));
        }
        return entry;
      },
      [&](const Convert::Params& params) { return launch<Convert>(params, params.tiles, stream); });
}
