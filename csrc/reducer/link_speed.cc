#include "reducer/link_speed.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

#include "c10d/tensors.h"

namespace pydist {
namespace {

constexpr std::int64_t kSmallBytes = 4096;
constexpr std::int64_t kLargeBytes = std::int64_t{4} << 20;
constexpr int kSmallTimes = 8;
constexpr int kLargeTimes = 3;

// The best of several, which is what the others would be without noise. Submitted and waited for,
// as buckets are.
double seconds_for(Communicator& communicator, const at::Tensor& memory, int times) {
  double best_s = std::numeric_limits<double>::infinity();
  for (int i = 0; i < times; ++i) {
    DenseTensors tensors(communicator, DenseTensors::Lifetime::kBorrowed);
    Operation operation{.kind = OpKind::kAllReduce, .label = "measuring the link"};
    operation.inputs = {tensors.input(memory)};
    operation.outputs = {tensors.output(memory)};
    tensors.attach_to(operation);
    const auto began = std::chrono::steady_clock::now();
    communicator.submit(std::move(operation))->wait();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    best_s = std::min(best_s, took.count());
  }
  return best_s;
}

}  // namespace

LinkSpeed measure_link(Communicator& communicator, const at::Tensor& memory) {
  const auto first_bytes = [&memory](std::int64_t bytes) {
    const auto count = bytes / static_cast<std::int64_t>(memory.itemsize());
    return memory.narrow(0, 0, std::min(memory.numel(), count));
  };
  const at::Tensor small = first_bytes(kSmallBytes);
  const at::Tensor large = first_bytes(kLargeBytes);
  const double small_s = seconds_for(communicator, small, kSmallTimes);
  const double large_s = seconds_for(communicator, large, kLargeTimes);
  const auto more_bytes = static_cast<double>(large.nbytes() - small.nbytes());
  return {small_s, more_bytes > 0 ? std::max(large_s - small_s, 0.0) / more_bytes : 0.0};
}

}  // namespace pydist
