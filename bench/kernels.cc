// How fast the CPU reduction kernels are, beside a plain copy that moves as many bytes.
//
//   bench_kernels [milliseconds per measurement, default 60] [portable|avx2|avx512|neon]
//
// GB/s count every byte read and every byte written once. "copy" is the faster of libc's memcpy
// and copy_bytes() with the same traffic, measured interleaved with the kernel; the last column is
// kernel / copy. "symmetric" is n inputs that are also the n outputs: what the owner of a slice
// does in an all-reduce on shared memory. ns/Ki is nanoseconds for 1024 elements.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cpu/reduce.h"

namespace {

using Clock = std::chrono::steady_clock;
using pydist::DType;
using pydist::InstructionSet;
using pydist::StoreHint;

class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : data_(::operator new(bytes, kAlignment)) {
    std::memset(data_, 0, bytes);
  }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { ::operator delete(data_, kAlignment); }

  [[nodiscard]] void* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{4096};
  void* data_;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

template <typename Function>
double seconds_per_call(const Function& function, int calls) {
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) {
    function();
  }
  return seconds_since(start) / calls;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Case {
  InstructionSet set;
  DType dtype;
  std::size_t inputs;
  bool symmetric;
  std::size_t bytes;  // of one buffer
  StoreHint hint;
};

void measure(const Case& test, double budget_s) {
  const std::size_t outputs = test.symmetric ? test.inputs : 1;
  const std::size_t traffic = (test.inputs + outputs) * test.bytes;
  std::vector<Buffer> buffers;
  for (std::size_t i = 0; i < test.inputs + (test.symmetric ? 0 : 1); ++i) {
    buffers.emplace_back(test.bytes);
  }
  std::vector<const void*> from;
  std::vector<void*> to;
  for (std::size_t i = 0; i < test.inputs; ++i) {
    from.push_back(buffers[i].data());
  }
  if (test.symmetric) {
    for (const Buffer& buffer : buffers) {
      to.push_back(buffer.data());
    }
  } else {
    to.push_back(buffers.back().data());
  }
  const std::size_t count = test.bytes / element_size(test.dtype);
  const auto kernel = [&] {
    pydist::reduce({.dtype = test.dtype, .op = pydist::ReduceOp::kSum}, from, to, count, test.hint,
                   test.set);
  };
  const Buffer source(traffic / 2);
  const Buffer target(traffic / 2);
  const auto libc_copy = [&] {
    std::memcpy(target.data(), source.data(), traffic / 2);
    asm volatile("" ::: "memory");
  };
  const auto hinted_copy = [&] {
    copy_bytes(target.data(), source.data(), traffic / 2, test.hint);
    asm volatile("" ::: "memory");
  };

  const double once = seconds_per_call(kernel, 1);
  const int calls = std::max(1, static_cast<int>(2e-3 / std::max(once, 1e-9)));
  std::vector<double> kernel_s, libc_s, hinted_s;
  const auto start = Clock::now();
  while (kernel_s.size() < 5 || seconds_since(start) < budget_s) {
    kernel_s.push_back(seconds_per_call(kernel, calls));
    libc_s.push_back(seconds_per_call(libc_copy, calls));
    hinted_s.push_back(seconds_per_call(hinted_copy, calls));
  }
  const double kernel_gb = static_cast<double>(traffic) / median(kernel_s) / 1e9;
  const double copy_gb =
      static_cast<double>(traffic) / std::min(median(libc_s), median(hinted_s)) / 1e9;
  std::printf("%-9s %-9s %zu -> %zu %-9s %9zu KiB %-9s %8.1f %8.1f %9.1f %6.2f\n",
              std::string(to_string(test.set)).c_str(), std::string(to_string(test.dtype)).c_str(),
              test.inputs, outputs, test.symmetric ? "symmetric" : "", test.bytes / 1024,
              test.hint == StoreHint::kStreaming ? "streaming" : "cached",
              median(kernel_s) * 1e9 * 1024 / static_cast<double>(count), kernel_gb, copy_gb,
              kernel_gb / copy_gb);
}

}  // namespace

int main(int argc, char** argv) {
  const double budget_s = argc > 1 ? std::atof(argv[1]) / 1e3 : 0.06;
  const auto usable = pydist::usable_instruction_sets();
  auto set = usable.back();
  if (argc > 2) {
    const auto found = std::find_if(usable.begin(), usable.end(), [&](InstructionSet candidate) {
      return to_string(candidate) == std::string_view(argv[2]);
    });
    if (found == usable.end()) {
      std::fprintf(stderr, "%s: not usable here\n", argv[2]);
      return 1;
    }
    set = *found;
  }
  std::printf("%-9s %-9s %-16s %13s %-9s %8s %8s %9s %6s\n", "set", "dtype", "buffers", "each",
              "stores", "ns/Ki", "GB/s", "copy GB/s", "ratio");
  // For L1, L2 and memory: all buffers of a case together, copy included, on today's servers.
  for (const std::size_t bytes :
       {std::size_t{4} << 10, std::size_t{128} << 10, std::size_t{64} << 20}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      for (const std::size_t inputs : {2, 4}) {
        for (const bool symmetric : {false, true}) {
          for (const StoreHint hint : {StoreHint::kCached, StoreHint::kStreaming}) {
            if (hint == StoreHint::kCached || bytes > (1u << 20)) {
              measure({set, dtype, inputs, symmetric, bytes, hint}, budget_s);
            }
          }
        }
      }
    }
  }
  return 0;
}
