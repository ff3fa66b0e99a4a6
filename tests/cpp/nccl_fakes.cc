#include "nccl_fakes.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "../fakes/cuda_driver.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_communicator.h"
#include "cuda/driver.h"
#include "cuda/stream.h"

namespace pydist::testing {
namespace {

void load(const std::string& path) {
  if (::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error(::dlerror());
  }
}

const std::string& folder() {
  static const std::string the_folder = PYDIST_FAKES;
  return the_folder;
}

// A process joins its threads before it ends; TSan insists. Some hang, as tests want them to. And
// ranks that are threads launch one at a time, so none can wait in its launch for the others.
class JoinsEnds : public ::testing::Environment {
 public:
  void SetUp() override { ::setenv("NCCL_RUNTIME_CONNECT", "0", 1); }
  void TearDown() override { LateEnds::of_process().join(Deadline::in(std::chrono::seconds(3))); }
};

[[maybe_unused]] const ::testing::Environment* const joins_ends =
    ::testing::AddGlobalTestEnvironment(new JoinsEnds);

}  // namespace

void use_fake_cuda() {
  static const bool is_loaded = [] {
    load(folder() + "/fake_cuda_driver/libcuda.so.1");
    load(folder() + "/fake_nccl/libnccl.so.2");
    return true;
  }();
  static_cast<void>(is_loaded);
}

nccl::ApiPtr fake_nccl() {
  use_fake_cuda();
  return nccl::Api::open("libnccl.so.2");
}

const CudaLibrary& fake_kernels() {
  use_fake_cuda();
  static const CudaLibrary library(folder() + "/fake_cuda_kernels/libpydist_cuda.so");
  return library;
}

const CudaLibrary& no_kernels() {
  static const CudaLibrary library("/nowhere/libpydist_cuda.so");
  return library;
}

CommunicatorPtr join_nccl(const RankOfTest& rank, const Environment& environment,
                          const CudaLibrary* kernels, Patience patience) {
  NcclOptions options;
  options.api = fake_nccl();
  options.host = rank.communicator;
  options.device = rank.rank;
  options.kernels = kernels;
  options.environment = environment;
  options.endpoint = rank.endpoint;
  options.end_patience = patience.end;
  options.name_patience = patience.name;
  options.long_wait = patience.long_wait;
  return create_nccl_communicator(std::move(options));
}

FakeSetting::FakeSetting(const char* name, const char* value) : name_(name) {
  ::setenv(name, value, 1);
}
FakeSetting::~FakeSetting() { ::unsetenv(name_); }

FakeStream::FakeStream(int device) : device_(device) {
  const cuda::DeviceGuard guard(device_);
  stream_ = cuda::Driver::get().create_stream();
}

FakeStream::~FakeStream() {
  const cuda::DeviceGuard guard(device_);
  const cuda::Driver& driver = cuda::Driver::get();
  driver.destroy_stream(stream_, driver.current_context());
}

void FakeStream::synchronize() const {
  const cuda::DeviceGuard guard(device_);
  while (!cuda::Driver::get().is_idle(stream_)) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Environment with_timeout_of(std::chrono::milliseconds timeout) {
  Environment environment = test_environment();
  environment.timeout = timeout;
  return environment;
}

Operation on_device(Operation operation, int device, void* stream) {
  for (Buffers* buffers : {&operation.inputs, &operation.outputs}) {
    for (Buffer& buffer : *buffers) {
      buffer.device = {DeviceType::kCuda, device};
    }
  }
  operation.stream = stream;
  return operation;
}

bool comes_true(const std::function<bool()>& holds, std::chrono::seconds patience) {
  const Deadline deadline = Deadline::in(patience * kSlowdown);
  while (!holds() && !deadline.has_passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return holds();
}

MemoryPtr allocate(const NcclRank& rank) {
  return rank.group->allocate(1000, Device{DeviceType::kCuda, rank.device});
}

Operation scaled(const NcclRank& rank, std::vector<float>& values) {
  Operation operation = rank.all_reduce(values, ReduceOp::kPremulSum);
  operation.factor = 2.0;
  operation.wire_dtype = DType::kBFloat16;
  return operation;
}

void* captured(const NcclRank& rank, const std::function<Operation()>& make) {
  ::fake_driver_begin_capture(rank.stream.get());
  const WorkPtr work = rank.group->submit(make());
  EXPECT_TRUE(work->wait_on_stream(rank.stream.get()));
  return ::fake_driver_end_capture(rank.stream.get());
}

std::vector<float>& kept_values(int rank) {
  static auto& kept = *new std::array<std::vector<float>, 2>;
  std::vector<float>& values = kept.at(static_cast<std::size_t>(rank));
  values.resize(100);
  return values;
}

}  // namespace pydist::testing
