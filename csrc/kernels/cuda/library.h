// The CUDA kernel library (kernels.h), opened at run time.
//
// It lies beside the file that this code is linked into (pydist/_native*.so) wherever pydist was
// built with nvcc. Opening it starts no driver, so a process may still fork; what touches a device
// says so. Once opened it stays, for the process. Thread safe.

#pragma once

#include <string>
#include <string_view>

#include "kernels/cuda/kernels.h"

namespace pydist {

class CudaLibrary {
 public:
  // The one that the process has loaded, otherwise the one beside this code. Opened at the first
  // call; later ones find the same object.
  static const CudaLibrary& get();

  // From the file `path`. Never throws for a library that cannot be used: reason() tells why.
  explicit CudaLibrary(const std::string& path);

  CudaLibrary(const CudaLibrary&) = delete;
  CudaLibrary& operator=(const CudaLibrary&) = delete;

  [[nodiscard]] bool is_loaded() const noexcept { return reason_.empty(); }

  // Why the library could not be loaded, in a sentence; empty where it was.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }

  // Why the kernels cannot run here: reason(), or that there is no driver or no device; empty where
  // they can. Starts the driver.
  [[nodiscard]] std::string reason_not_to_run() const;
  // The same of one device, onto which it puts the kernels: they may have been compiled for others.
  [[nodiscard]] std::string reason_not_to_run_on(int device) const;

  // As in kernels.h. They throw InvalidUsage for a faulty descriptor and where the library is
  // not loaded, Error where CUDA refuses.
  void load_kernels() const;
  void reduce(const PydistCudaReduce& reduce, void* stream) const;
  void convert(const PydistCudaConvert& convert, void* stream) const;
  void adam(const PydistCudaAdam& adam, void* stream) const;
  void sgd(const PydistCudaSgd& sgd, void* stream) const;

 private:
#define PYDIST_CUDA_MEMBER(name) decltype(&pydist_cuda_##name) name = nullptr;
  struct Functions {
    PYDIST_CUDA_FUNCTIONS(PYDIST_CUDA_MEMBER)
  };
#undef PYDIST_CUDA_MEMBER

  template <typename Descriptor>
  void launch(std::string_view name, int (*function)(const Descriptor*, void*),
              const Descriptor& descriptor, void* stream) const;
  void throw_unless_loaded(std::string_view name) const;
  void throw_unless_done(std::string_view name, int error) const;
  [[nodiscard]] static std::string find();
  // Sets `functions_`, or returns why not.
  std::string open(const std::string& path);

  Functions functions_;
  std::string reason_;
};

}  // namespace pydist
