// Opening the CUDA kernel library, and what its functions refuse: all without a device.

#include "kernels/cuda_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/cuda_arguments.h"

namespace pydist {
namespace {

// ---- opening ------------------------------------------------------------------------------

// The interface version that fake_cuda_library.cc claims; it has no other function.
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
  EXPECT_EQ(library.targets(), "");
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
  const PydistCudaConvert nothing{
      .segments = nullptr, .segment_count = 0, .scale = 1, .device_scale = nullptr};
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

}  // namespace
}  // namespace pydist
