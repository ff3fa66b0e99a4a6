// Opening the CUDA kernel library, and what its functions refuse: all without a device.

#include "kernels/cuda/library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/cuda/arguments.h"

namespace pydist {
namespace {

// ---- opening ------------------------------------------------------------------------------

// The interface version that fake_library.cc claims; it has no other function.
std::string reason_for_fake(const char* version) {
  setenv("PYDIST_TEST_FAKE_CUDA_ABI", version, /*overwrite=*/1);
  return CudaLibrary(PYDIST_TEST_FAKE_CUDA_LIBRARY).reason();
}

TEST(CudaLibrary, MissingFileSaysHowToGetIt) {
  const CudaLibrary library("/nowhere/libpydist_cuda.so");
  EXPECT_FALSE(library.is_loaded());
  EXPECT_NE(library.reason().find("built without nvcc"), std::string::npos) << library.reason();
  EXPECT_NE(library.reason().find("/nowhere/libpydist_cuda.so"), std::string::npos);
  EXPECT_EQ(library.reason_not_to_run(), library.reason());
  EXPECT_EQ(library.reason_not_to_run_on(0), library.reason());
}

TEST(CudaLibrary, WhatIsNoLibraryIsRefused) {
  const CudaLibrary library("/proc/self/status");
  EXPECT_NE(library.reason().find("could not be loaded: "), std::string::npos) << library.reason();
}

TEST(CudaLibrary, AForeignLibraryIsRefused) {
  Dl_info libm{};
  ASSERT_NE(
      dladdr(reinterpret_cast<const void*>(static_cast<double (*)(double)>(&std::tgamma)), &libm),
      0);
  const CudaLibrary library(libm.dli_fname);
  EXPECT_NE(library.reason().find("no pydist_cuda_abi_version"), std::string::npos)
      << library.reason();
}

TEST(CudaLibrary, AnotherInterfaceVersionIsRefused) {
  const std::string reason = reason_for_fake("99999");
  EXPECT_NE(reason.find("interface 99999, this build expects "), std::string::npos) << reason;
}

TEST(CudaLibrary, MissingFunctionsAreNamed) {
  const std::string reason = reason_for_fake(std::to_string(PYDIST_CUDA_ABI_VERSION).c_str());
  EXPECT_NE(reason.find("lacks pydist_cuda_targets, "), std::string::npos) << reason;
  EXPECT_NE(reason.find("pydist_cuda_sgd"), std::string::npos) << reason;
  EXPECT_EQ(reason.find("pydist_cuda_abi_version,"), std::string::npos) << reason;
}

TEST(CudaLibrary, FunctionsOfAMissingLibraryThrowTheReason) {
  const CudaLibrary library("/nowhere/libpydist_cuda.so");
  const PydistCudaConvert nothing{.segments = nullptr, .segment_count = 0, .scale = 1};
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { library.convert(nothing, nullptr); }, [&] { library.load_kernels(); }}) {
    try {
      call();
      FAIL() << "did not throw";
    } catch (const InvalidUsage& error) {
      EXPECT_NE(std::string(error.what()).find("built without nvcc"), std::string::npos);
    }
  }
}

TEST(CudaLibrary, IsLookedForBesideThisCodeOnce) {
  const CudaLibrary& library = CudaLibrary::get();
  EXPECT_EQ(&library, &CudaLibrary::get());
  if (!library.is_loaded()) {
    EXPECT_NE(library.reason().find("/libpydist_cuda.so"), std::string::npos) << library.reason();
  }
}

// ---- arguments ----------------------------------------------------------------------------

// Addresses that are only looked at.
void* address(std::uintptr_t value) { return reinterpret_cast<void*>(value); }

void expect_fault(const std::string& fault, const std::string& part) {
  EXPECT_NE(fault.find(part), std::string::npos) << "'" << fault << "' lacks '" << part << "'";
}

struct ReduceCall {
  std::vector<const void*> inputs = {address(0x1000), address(0x2000)};
  std::vector<DType> dtypes = {DType::kFloat32, DType::kFloat32};
  PydistCudaReduce reduce{.inputs = nullptr,
                          .input_dtypes = nullptr,
                          .factors = nullptr,
                          .output = address(0x3000),
                          .count = 10,
                          .divisor = 1,
                          .input_count = 0,
                          .op = ReduceOp::kSum,
                          .output_dtype = DType::kFloat32,
                          .wire_dtype = DType::kFloat32};

  std::string fault() {
    reduce.inputs = inputs.data();
    reduce.input_dtypes = dtypes.data();
    reduce.input_count = static_cast<std::uint32_t>(inputs.size());
    return fault_in(reduce);
  }
};

TEST(CudaArguments, ReduceTakesWhatMakesSense) {
  EXPECT_EQ(ReduceCall().fault(), "");
  ReduceCall mixed;
  mixed.dtypes = {DType::kBFloat16, DType::kFloat32};
  mixed.reduce.output_dtype = DType::kFloat16;
  mixed.reduce.wire_dtype = DType::kBFloat16;
  EXPECT_EQ(mixed.fault(), "");
  ReduceCall empty;
  empty.inputs = {nullptr, nullptr};
  empty.reduce.output = nullptr;
  empty.reduce.count = 0;
  EXPECT_EQ(empty.fault(), "");
  ReduceCall parts;
  parts.dtypes = {DType::kComplex128, DType::kComplex128};
  parts.reduce.output_dtype = DType::kComplex128;
  parts.reduce.output = address(0x3008);
  EXPECT_EQ(parts.fault(), "");
}

TEST(CudaArguments, ReduceSaysWhatIsWrong) {
  const auto fault = [](auto change) {
    ReduceCall call;
    change(call);
    return call.fault();
  };
  expect_fault(fault([](ReduceCall& c) { c.inputs.clear(); }),
               "takes one or two inputs, each with its dtype; got 0");
  expect_fault(fault([](ReduceCall& c) { c.inputs[1] = nullptr; }), "input 1 is null");
  expect_fault(fault([](ReduceCall& c) { c.inputs[1] = address(0x2002); }), "input 1 at 0x2002");
  expect_fault(fault([](ReduceCall& c) { c.reduce.output = address(0x3001); }),
               "the output at 0x3001 is not aligned to its elements, which need 4 bytes");
  expect_fault(fault([](ReduceCall& c) { c.reduce.op = static_cast<ReduceOp>(77); }), "op 77");
  expect_fault(fault([](ReduceCall& c) { c.reduce.op = ReduceOp::kBxor; }),
               "bxor is not defined for float32");
  expect_fault(fault([](ReduceCall& c) { c.reduce.op = ReduceOp::kPremulSum; }),
               "one factor for each of 2 inputs");
  expect_fault(fault([](ReduceCall& c) { c.dtypes[1] = DType::kFloat64; }),
               "input 1 is float64 and the output float32");
  expect_fault(fault([](ReduceCall& c) { c.dtypes[0] = static_cast<DType>(99); }), "dtype 99");
  expect_fault(fault([](ReduceCall& c) { c.reduce.wire_dtype = DType::kInt8; }),
               "the wire type must be float16, bfloat16 or, for none, float32, got int8");
  expect_fault(fault([](ReduceCall& c) {
                 c.dtypes.assign(2, DType::kFloat64);
                 c.reduce.output_dtype = DType::kFloat64;
                 c.reduce.wire_dtype = DType::kFloat16;
               }),
               "not for float64");
  expect_fault(fault([](ReduceCall& c) { c.reduce.count = (std::uint64_t{1} << 40) + 1; }),
               "too many for one buffer");
  expect_fault(fault([](ReduceCall& c) {
                 c.dtypes[0] = DType::kBFloat16;
                 c.reduce.output = address(0x1000);
               }),
               "input 0, bfloat16, is also the output");
  expect_fault(fault([](ReduceCall& c) {
                 c.inputs.push_back(address(0x4000));
                 c.dtypes.push_back(DType::kFloat32);
               }),
               "takes one or two inputs, each with its dtype; got 3");
}

TEST(CudaArguments, ConvertSaysWhichSegmentIsWrong) {
  const auto fault = [](DType from, DType to, void* target, double scale) {
    const PydistCudaSegment segments[] = {
        {.from = address(0x1000),
         .to = address(0x2000),
         .count = 4,
         .from_dtype = DType::kFloat32,
         .to_dtype = DType::kFloat16},
        {.from = address(0x1000), .to = target, .count = 4, .from_dtype = from, .to_dtype = to}};
    return fault_in(PydistCudaConvert{.segments = segments, .segment_count = 2, .scale = scale});
  };
  EXPECT_EQ(fault(DType::kInt64, DType::kInt64, address(0x2000), 1), "");
  expect_fault(fault(DType::kInt64, DType::kInt64, address(0x2000), 2),
               "segment 1 of 2: int64 elements can be copied but not scaled");
  expect_fault(fault(DType::kInt8, DType::kFloat32, address(0x2000), 1),
               "segment 1 of 2: no conversion from int8 to float32");
  expect_fault(fault(DType::kFloat32, DType::kFloat16, nullptr, 1), "the target is null");
  expect_fault(fault(DType::kFloat32, DType::kFloat16, address(0x1000), 1), "differ in size");
  EXPECT_EQ(fault(DType::kFloat16, DType::kBFloat16, address(0x1000), 1), "");
  expect_fault(fault_in(PydistCudaConvert{.segments = nullptr, .segment_count = 3, .scale = 1}),
               "the table of 3 segments is null");
  const auto* const skewed = static_cast<const double*>(address(0x1004));
  expect_fault(fault_in(PydistCudaConvert{
                   .segments = nullptr, .segment_count = 0, .scale = 1, .device_scale = skewed}),
               "the scale on the device at 0x1004 is not aligned");
  const auto* const aligned = static_cast<const double*>(address(0x1008));
  expect_fault(fault_in(PydistCudaConvert{.segments = nullptr,
                                          .segment_count = 0,
                                          .scale = 1,
                                          .device_scale = aligned,
                                          .device_divisor = skewed}),
               "the divisor on the device at 0x1004 is not aligned");
  expect_fault(fault_in(PydistCudaConvert{
                   .segments = nullptr, .segment_count = 0, .scale = 1, .device_divisor = aligned}),
               "a divisor on the device divides no scale there");
  const PydistCudaSegment whole[] = {{.from = address(0x1000),
                                      .to = address(0x2000),
                                      .count = 4,
                                      .from_dtype = DType::kInt64,
                                      .to_dtype = DType::kInt64}};
  expect_fault(fault_in(PydistCudaConvert{
                   .segments = whole, .segment_count = 1, .scale = 1, .device_scale = aligned}),
               "int64 elements can be copied but not scaled");
}

TEST(CudaArguments, StepsNameTheirHyperparameters) {
  auto* const state = static_cast<float*>(address(0x1000));
  const PydistCudaAdamSegment segment{.gradient = state,
                                      .master = state,
                                      .exp_avg = state,
                                      .exp_avg_sq = state,
                                      .max_exp_avg_sq = nullptr,
                                      .parameter = nullptr,
                                      .count = 4,
                                      .gradient_dtype = DType::kBFloat16,
                                      .parameter_dtype = DType::kFloat32};
  const PydistCudaStep common{.lr = 0.1, .weight_decay = 0, .gradient_scale = 1, .maximize = 0};
  const PydistCudaAdam right{.segments = &segment,
                             .segment_count = 1,
                             .common = common,
                             .beta1 = 0.9,
                             .beta2 = 0.99,
                             .eps = 1e-8,
                             .step = 1,
                             .decoupled_weight_decay = 0,
                             .amsgrad = 0};
  const auto fault = [&](auto change) {
    PydistCudaAdam adam = right;
    change(adam);
    return fault_in(adam);
  };
  EXPECT_EQ(fault([](PydistCudaAdam&) {}), "");
  expect_fault(fault([](PydistCudaAdam& a) { a.beta2 = 1; }), "beta2 must be in [0, 1), got 1");
  expect_fault(fault([](PydistCudaAdam& a) { a.step = 0; }), "the first step is 1");
  expect_fault(fault([](PydistCudaAdam& a) { a.common.lr = -1; }), "lr must be");
  expect_fault(fault([](PydistCudaAdam& a) { a.eps = std::nan(""); }), "eps must be");
  expect_fault(fault([](PydistCudaAdam& a) { a.amsgrad = 1; }), "max_exp_avg_sq is null");
  expect_fault(
      fault([](PydistCudaAdam& a) { a.common.found_inf = static_cast<float*>(address(0x1002)); }),
      "found_inf");

  const PydistCudaSgdSegment trained{.gradient = state,
                                     .master = state,
                                     .momentum = nullptr,
                                     .parameter = nullptr,
                                     .count = 4,
                                     .gradient_dtype = DType::kFloat32,
                                     .parameter_dtype = DType::kFloat32};
  PydistCudaSgd sgd{.segments = &trained,
                    .segment_count = 1,
                    .common = common,
                    .momentum = 0,
                    .dampening = 0,
                    .nesterov = 0,
                    .first_step = 1};
  EXPECT_EQ(fault_in(sgd), "");
  sgd.nesterov = 1;
  expect_fault(fault_in(sgd), "Nesterov momentum needs a momentum");
  sgd.momentum = 0.9;
  expect_fault(fault_in(sgd), "the momentum buffer is null");
}

}  // namespace
}  // namespace pydist
