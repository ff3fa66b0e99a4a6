#include "communicator/nccl/nccl_api.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/log.h"

// The functions that pydist cannot do without.
#define PYDIST_NEEDED(each)                                                                        \
  each(ncclGetUniqueId) each(ncclCommInitRankConfig) each(ncclCommFinalize) each(ncclCommDestroy)  \
      each(ncclCommAbort) each(ncclCommGetAsyncError) each(ncclGetErrorString) each(ncclAllReduce) \
          each(ncclReduceScatter) each(ncclAllGather) each(ncclBroadcast) each(ncclReduce)         \
              each(ncclRedOpCreatePreMulSum) each(ncclRedOpDestroy) each(ncclSend) each(ncclRecv)  \
                  each(ncclGroupStart) each(ncclGroupEnd)

// What an NCCL may lack. The version has a message of its own.
#define PYDIST_OPTIONAL(each)                                                        \
  each(ncclGetVersion) each(ncclGetLastError) each(ncclCommSplit) each(ncclMemAlloc) \
      each(ncclMemFree) each(ncclCommRegister) each(ncclCommDeregister)

namespace pydist::nccl {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr int kFirstWithMemory = 21900;

std::string text_of_version(int version) {
  return join(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// The path of the library that a function of it lies in.
std::string path_of(const void* function) {
  Dl_info info{};
  return ::dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : kLibrary;
}

void* open_library(const std::string& path) {
  // Prefers the copy that torch has loaded: two copies in one process do not share their state.
  if (void* const loaded = ::dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD)) {
    return loaded;
  }
  if (void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    return library;
  }
  const char* const why = ::dlerror();
  throw TransportError(join("NCCL cannot be loaded: ", why == nullptr ? path.c_str() : why,
                            ". A CUDA build of torch brings it; so does the package "
                            "nvidia-nccl-cu12 or -cu13."));
}

}  // namespace

void warn_of_blocking_communicators() {
  static std::atomic<bool> has_warned{false};
  const char* const text = std::getenv("NCCL_COMM_BLOCKING");
  if (text != nullptr && std::string_view(text) == "1" && !has_warned.exchange(true)) {
    log_line(LogLevel::kWarning,
             "NCCL_COMM_BLOCKING=1 makes calls of NCCL wait for the other ranks: where one of them "
             "fails or dies meanwhile, this rank may hang. Unset it.");
  }
}

bool may_be_of_a_peer(Result result) noexcept {
  switch (result) {
    case Result::kSystemError:  // a connection that was reset, for one
    case Result::kInternalError:
    case Result::kRemoteError:
    case Result::kTimeout:
      return true;
    default:
      return false;
  }
}

std::shared_ptr<const Api> Api::open(const std::string& path) {
  void* const library = open_library(path);  // never closed
  Functions functions{};
  const auto resolve = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(  // NOLINT
        ::dlsym(library, name));
  };
#define PYDIST_RESOLVE(name) resolve(functions.name, #name);
  PYDIST_NEEDED(PYDIST_RESOLVE)
  PYDIST_OPTIONAL(PYDIST_RESOLVE)
#undef PYDIST_RESOLVE
  const std::string origin = functions.ncclGetVersion == nullptr
                                 ? std::string(kLibrary)
                                 : path_of(reinterpret_cast<const void*>(functions.ncclGetVersion));
  return std::make_shared<const Api>(functions, origin);
}

Api::Api(const Functions& functions, std::string origin)
    : functions_(functions), origin_(std::move(origin)) {
  // The version first: a library that is too old lacks functions as a matter of course.
  if (functions_.ncclGetVersion == nullptr ||
      functions_.ncclGetVersion(&version_) != Result::kSuccess) {
    throw TransportError(join("The NCCL at ", origin_, " does not tell its version."));
  }
  if (version_ < kLeastVersion) {
    throw TransportError(join("The NCCL at ", origin_, " is version ", version_text(),
                              "; pydist needs ", text_of_version(kLeastVersion),
                              " or later. Install a newer nvidia-nccl-cu12 or -cu13."));
  }
  std::string missing;
  const auto require = [&missing](auto function, const char* name) {
    if (function == nullptr) {
      missing += join(missing.empty() ? "" : ", ", name);
    }
  };
#define PYDIST_REQUIRE(name) require(functions_.name, #name);
  PYDIST_NEEDED(PYDIST_REQUIRE)
#undef PYDIST_REQUIRE
  if (!missing.empty()) {
    throw TransportError(join("The NCCL ", version_text(), " at ", origin_, " lacks ", missing,
                              ": it is no complete NCCL. Install nvidia-nccl-cu12 or -cu13 anew."));
  }
}

std::string Api::version_text() const { return text_of_version(version_); }

bool Api::has_registration() const noexcept {
  return version_ >= kFirstWithMemory && functions_.ncclMemAlloc != nullptr &&
         functions_.ncclMemFree != nullptr && functions_.ncclCommRegister != nullptr &&
         functions_.ncclCommDeregister != nullptr;
}

std::string Api::describe(Result result, CommHandle comm) const {
  std::string text = functions_.ncclGetErrorString(result);
  if (functions_.ncclGetLastError != nullptr) {
    const char* const last = functions_.ncclGetLastError(comm);
    if (last != nullptr && *last != '\0') {
      text += join(" (", last, ")");
    }
  }
  return text;
}

std::exception_ptr Api::error_of(Result result, const std::string& what, CommHandle comm) const {
  const ErrorKind kind = result == Result::kRemoteError ? ErrorKind::kPeerLost
                         : result == Result::kTimeout   ? ErrorKind::kTimeout
                         : result == Result::kInvalidArgument || result == Result::kInvalidUsage
                             ? ErrorKind::kInvalidUsage
                             : ErrorKind::kTransport;
  return make_error(kind, join(what, ": NCCL ", version_text(), " says: ", describe(result, comm),
                               ". NCCL_DEBUG=INFO makes it say more."));
}

}  // namespace pydist::nccl
