// NVIDIA's NCCL, opened at run time: the copy that torch has loaded, else one that is found on a
// given path.
//
// No header and no link: one build serves machines with and without NCCL, and any version from
// 2.18 on. What came later is optional, and asked for by name (has_registration). The table of
// functions can be another one than the library's, so that what NCCL does when it fails is tested
// without a GPU. Thread safe, as far as NCCL is.

#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/error.h"

namespace pydist::nccl {

using CommHandle = void*;    // ncclComm_t
using StreamHandle = void*;  // cudaStream_t

// ncclResult_t
enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // of later versions
};

// Whether a peer that is gone may be the reason for a failure.
[[nodiscard]] bool may_be_of_a_peer(Result result) noexcept;

// NCCL's own variable overrides what a communicator is configured with.
void warn_of_blocking_communicators();

// ncclDataType_t
enum class DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

// ncclRedOp_t; what a communicator makes itself has other numbers.
enum class RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

// ncclScalarResidence_t: when a scalar that is given by its address is read.
enum class ScalarResidence : int { kDevice = 0, kHostImmediate = 1 };

struct UniqueId {
  std::array<char, 128> bytes;
};

// ncclConfig_t as of 2.14, the first version that has one. NCCL reads `size` bytes of it, and takes
// its own defaults for fields that were added after `version`. Of these are the resources of a
// parent (splitShare): none are shared, since with them the children would share its abort.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int unused = 0;
};
static_assert(sizeof(Config) == 24);

// Null where the library lacks it.
struct Functions {
  Result (*ncclGetVersion)(int*);
  Result (*ncclGetUniqueId)(UniqueId*);
  Result (*ncclCommInitRankConfig)(CommHandle*, int, UniqueId, int, Config*);
  Result (*ncclCommFinalize)(CommHandle);
  Result (*ncclCommDestroy)(CommHandle);
  Result (*ncclCommAbort)(CommHandle);
  Result (*ncclCommGetAsyncError)(CommHandle, Result*);
  const char* (*ncclGetErrorString)(Result);
  const char* (*ncclGetLastError)(CommHandle);
  Result (*ncclAllReduce)(const void*, void*, std::size_t, DataType, RedOp, CommHandle,
                          StreamHandle);
  Result (*ncclReduceScatter)(const void*, void*, std::size_t, DataType, RedOp, CommHandle,
                              StreamHandle);
  Result (*ncclAllGather)(const void*, void*, std::size_t, DataType, CommHandle, StreamHandle);
  Result (*ncclBroadcast)(const void*, void*, std::size_t, DataType, int, CommHandle, StreamHandle);
  Result (*ncclReduce)(const void*, void*, std::size_t, DataType, RedOp, int, CommHandle,
                       StreamHandle);
  Result (*ncclRedOpCreatePreMulSum)(RedOp*, void*, DataType, ScalarResidence, CommHandle);
  Result (*ncclRedOpDestroy)(RedOp, CommHandle);
  Result (*ncclSend)(const void*, std::size_t, DataType, int, CommHandle, StreamHandle);
  Result (*ncclRecv)(void*, std::size_t, DataType, int, CommHandle, StreamHandle);
  Result (*ncclGroupStart)();
  Result (*ncclGroupEnd)();
  // From 2.18.
  Result (*ncclCommSplit)(CommHandle, int, int, CommHandle*, Config*);
  // From 2.19.
  Result (*ncclMemAlloc)(void**, std::size_t);
  Result (*ncclMemFree)(void*);
  Result (*ncclCommRegister)(CommHandle, void*, std::size_t, void**);
  Result (*ncclCommDeregister)(CommHandle, void*);
};

class Api {
 public:
  // The libnccl.so.2 that this process has loaded, otherwise the one at `path`. Throws
  // TransportError that says what stands in the way.
  [[nodiscard]] static std::shared_ptr<const Api> open(const std::string& path);

  // Over functions that somebody else has found; `origin` is for people. Throws TransportError
  // where one is missing that cannot be done without, or the version is too old.
  Api(const Functions& functions, std::string origin);

  // 22809 for 2.28.9.
  [[nodiscard]] int version() const noexcept { return version_; }
  // "2.28.9".
  [[nodiscard]] std::string version_text() const;
  // The library's path.
  [[nodiscard]] const std::string& origin() const noexcept { return origin_; }

  // Memory of NCCL's own, registered with communicators.
  [[nodiscard]] bool has_registration() const noexcept;

  [[nodiscard]] const Functions& functions() const noexcept { return functions_; }

  // NCCL's words for a failure, with the last message of the communicator, which may be null.
  [[nodiscard]] std::string describe(Result result, CommHandle comm) const;
  // The error that stands for a failure of `what`.
  [[nodiscard]] std::exception_ptr error_of(Result result, const std::string& what,
                                            CommHandle comm) const;

 private:
  Functions functions_;
  std::string origin_;
  int version_ = 0;
};

using ApiPtr = std::shared_ptr<const Api>;

inline constexpr int kLeastVersion = 21800;

}  // namespace pydist::nccl
