#include "kernels/cuda/library.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "cuda/driver.h"
#include "kernels/cuda/arguments.h"

namespace pydist {
namespace {

constexpr const char* kFileName = "libpydist_cuda.so";

// Of the shared library or program that holds this code.
std::filesystem::path own_folder() {
  static const char own_symbol = 0;
  Dl_info info{};
  if (dladdr(&own_symbol, &info) == 0 || info.dli_fname == nullptr) {
    return {};
  }
  // A program's name may be relative to where it was started.
  std::error_code ignored;
  const auto path = std::filesystem::weakly_canonical(info.dli_fname, ignored);
  return ignored ? std::filesystem::path(info.dli_fname).parent_path() : path.parent_path();
}

std::string dlopen_error() {
  const char* const error = dlerror();
  return error != nullptr ? error : "no reason given";
}

}  // namespace

const CudaLibrary& CudaLibrary::get() {
  // Never destroyed: work on a stream may outlive static destructors.
  static const auto* const library = new CudaLibrary(find());
  return *library;
}

std::string CudaLibrary::find() {
  // One of that name that the process has loaded goes first, as with NCCL.
  if (void* const loaded = dlopen(kFileName, RTLD_NOW | RTLD_NOLOAD)) {
    Dl_info info{};
    void* const symbol = dlsym(loaded, "pydist_cuda_abi_version");
    if (symbol != nullptr && dladdr(symbol, &info) != 0) {
      return info.dli_fname;
    }
  }
  return (own_folder() / kFileName).string();
}

CudaLibrary::CudaLibrary(const std::string& path) : reason_(open(path)) {
  if (!reason_.empty()) {
    functions_ = {};
  }
}

std::string CudaLibrary::open(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    return join("pydist was built without nvcc, so it has no CUDA kernels (", path,
                " does not exist): install the CUDA toolkit and build pydist again");
  }
  // Never closed: CUDA's own static destructors run at exit.
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return join("the CUDA kernels could not be loaded: ", dlopen_error());
  }
  functions_.abi_version =
      reinterpret_cast<decltype(functions_.abi_version)>(dlsym(handle, "pydist_cuda_abi_version"));
  if (functions_.abi_version == nullptr) {
    return join(path, " is not pydist's: it has no pydist_cuda_abi_version. Build pydist again");
  }
  const int version = functions_.abi_version();
  if (version != PYDIST_CUDA_ABI_VERSION) {
    return join(path, " is of another build of pydist (interface ", version,
                ", this build expects ", PYDIST_CUDA_ABI_VERSION, "): build pydist again");
  }
  std::string missing;
#define PYDIST_CUDA_RESOLVE(name)                                                       \
  functions_.name =                                                                     \
      reinterpret_cast<decltype(functions_.name)>(dlsym(handle, "pydist_cuda_" #name)); \
  if (functions_.name == nullptr) {                                                     \
    missing += missing.empty() ? "" : ", ";                                             \
    missing += "pydist_cuda_" #name;                                                    \
  }
  PYDIST_CUDA_FUNCTIONS(PYDIST_CUDA_RESOLVE)
#undef PYDIST_CUDA_RESOLVE
  if (!missing.empty()) {
    return join(path, " lacks ", missing, ": build pydist again");
  }
  return {};
}

std::string CudaLibrary::reason_not_to_run() const {
  if (!is_loaded()) {
    return reason_;
  }
  int count = 0;
  const int error = functions_.device_count(&count);
  if (error != 0) {
    return join("CUDA cannot be used on this machine: ", functions_.error_text(error), " (error ",
                error, "). The kernels need a GPU and a driver for the CUDA version of the nvcc ",
                "that pydist was built with, or a later one");
  }
  return count > 0 ? "" : "this process sees no CUDA device (CUDA_VISIBLE_DEVICES may hide them)";
}

std::string CudaLibrary::reason_not_to_run_on(int device) const {
  if (std::string reason = reason_not_to_run(); !reason.empty()) {
    return reason;
  }
  try {
    const cuda::DeviceGuard guard(device);
    load_kernels();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

void CudaLibrary::throw_unless_loaded(std::string_view name) const {
  if (!is_loaded()) {
    throw InvalidUsage(join("CUDA ", name, ": ", reason_, "."));
  }
}

void CudaLibrary::throw_unless_done(std::string_view name, int error) const {
  if (error != 0) {
    throw Error(ErrorKind::kError,
                join("CUDA ", name, ": ", functions_.error_text(error), " (error ", error, ")"));
  }
}

template <typename Descriptor>
void CudaLibrary::launch(std::string_view name, int (*function)(const Descriptor*, void*),
                         const Descriptor& descriptor, void* stream) const {
  const std::string fault = fault_in(descriptor);
  if (!fault.empty()) {
    throw InvalidUsage(join("CUDA ", name, ": ", fault));
  }
  throw_unless_loaded(name);
  throw_unless_done(name, function(&descriptor, stream));
}

void CudaLibrary::load_kernels() const {
  throw_unless_loaded("load_kernels");
  throw_unless_done("load_kernels", functions_.load_kernels());
}

void CudaLibrary::reduce(const PydistCudaReduce& reduce, void* stream) const {
  launch("reduce", functions_.reduce, reduce, stream);
}

void CudaLibrary::convert(const PydistCudaConvert& convert, void* stream) const {
  launch("convert", functions_.convert, convert, stream);
}

void CudaLibrary::adam(const PydistCudaAdam& adam, void* stream) const {
  launch("adam", functions_.adam, adam, stream);
}

void CudaLibrary::sgd(const PydistCudaSgd& sgd, void* stream) const {
  launch("sgd", functions_.sgd, sgd, stream);
}

}  // namespace pydist
