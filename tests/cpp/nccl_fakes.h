// The fakes of tests/fakes, loaded before the engine looks for the real libraries.

#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "communicator/nccl/nccl_api.h"
#include "health/long_wait.h"
#include "kernels/cuda/library.h"
#include "ranks.h"

namespace pydist::testing {

// Loads them once; every test that touches CUDA calls it first.
void use_fake_cuda();

[[nodiscard]] nccl::ApiPtr fake_nccl();
[[nodiscard]] const CudaLibrary& fake_kernels();
// Of a build without nvcc.
[[nodiscard]] const CudaLibrary& no_kernels();

// As in NcclOptions.
struct Patience {
  std::chrono::milliseconds end{2'000};
  std::chrono::milliseconds name{200};
  std::chrono::milliseconds long_wait = kLongWait;
};
// Longer than any test: whoever waits for an end of NCCL's that does not come hangs.
inline constexpr std::chrono::hours kForTheEnd{1};

// For a rank of run_ranks(): an NCCL group over its native one, on the device of its rank.
[[nodiscard]] CommunicatorPtr join_nccl(const RankOfTest& rank,
                                        const Environment& environment = test_environment(),
                                        const CudaLibrary* kernels = &fake_kernels(),
                                        Patience patience = {});

// A variable as in tests/fakes, for as long as it lives. Before the ranks start.
class FakeSetting {
 public:
  FakeSetting(const char* name, const char* value);
  ~FakeSetting();
  FakeSetting(const FakeSetting&) = delete;
  FakeSetting& operator=(const FakeSetting&) = delete;

 private:
  const char* name_;
};

// FAKE_NCCL_FAULT.
class FakeFault : public FakeSetting {
 public:
  explicit FakeFault(const char* faults) : FakeSetting("FAKE_NCCL_FAULT", faults) {}
};

// A stream of the calling rank's own, and "device" memory with values.
class FakeStream {
 public:
  explicit FakeStream(int device);
  ~FakeStream();
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;
  [[nodiscard]] void* get() const noexcept { return stream_; }
  // Waits on the host for what was put on it.
  void synchronize() const;

 private:
  int device_;
  void* stream_ = nullptr;
};

// Turns an operation on host memory into one on a device.
[[nodiscard]] Operation on_device(Operation operation, int device, void* stream);

[[nodiscard]] Environment with_timeout_of(std::chrono::milliseconds timeout);

// A rank with a stream that it computes on.
struct NcclRank {
  explicit NcclRank(const RankOfTest& self, const Environment& environment = test_environment(),
                    Patience patience = {})
      : group(join_nccl(self, environment, &fake_kernels(), patience)),
        device(self.rank),
        stream(device) {}

  template <typename T>
  [[nodiscard]] Operation all_reduce(std::vector<T>& values, ReduceOp op = ReduceOp::kSum) const {
    return on_device(testing::all_reduce(values, op), device, stream.get());
  }

  CommunicatorPtr group;
  int device;
  FakeStream stream;
};

// Waits for `holds`, for a while; returns whether it does.
[[nodiscard]] bool comes_true(const std::function<bool()>& holds,
                              std::chrono::seconds patience = std::chrono::seconds(10));

// Some memory of the group's on the rank's device.
[[nodiscard]] MemoryPtr allocate(const NcclRank& rank);

// A premul_sum that travels in 16 bits, and so passes through scratch memory.
[[nodiscard]] Operation scaled(const NcclRank& rank, std::vector<float>& values);

// The graph that holds an operation.
[[nodiscard]] void* captured(const NcclRank& rank, const std::function<Operation()>& make);

// Values of one of two ranks, for an operation that never ends: what it uses has to stay.
[[nodiscard]] std::vector<float>& kept_values(int rank);

}  // namespace pydist::testing
