// Ranks as threads: runs a function on p threads, each with an Endpoint and a communicator of its
// own, over a store in memory.
//
// A rank that throws lets go of its communicator, so its peers end with PeerLost instead of
// hanging. A run that takes too long is a hang: what every rank is in goes to stderr, then the
// stack of every thread (time_limit.h), and the process exits.

#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "communicator/communicator.h"
#include "communicator/peers/endpoint.h"
#include "topology/key_value_store.h"

namespace pydist::testing {

// What a thread that plays a rank has.
struct RankOfTest {
  int rank = 0;
  int size = 1;
  StorePtr store;
  std::shared_ptr<Endpoint> endpoint;
  CommunicatorPtr communicator;
  std::optional<std::string> host_id = std::nullopt;  // PYDIST_HOST_ID
};

// Which host each rank is on, by rank; empty: all on this one. Ranks of different hosts share no
// memory and talk over the loopback.
using HostsOfRanks = std::vector<int>;

using RankFunction = std::function<void(RankOfTest&)>;

// A timeout short enough for a test that hangs to fail with a diagnosis rather than at its limit;
// otherwise the defaults, whatever the variables of this process say.
[[nodiscard]] Environment test_environment();

// Joins `size` ranks and calls `function` on each. Any exception fails the test.
void run_ranks(int size, const RankFunction& function,
               const Environment& environment = test_environment(), const HostsOfRanks& hosts = {});

// The same where ranks are expected to fail: returns each rank's exception, null where none.
[[nodiscard]] std::vector<std::exception_ptr> collect_errors(
    int size, const RankFunction& function, const Environment& environment = test_environment(),
    const HostsOfRanks& hosts = {});

// As collect_errors(), but `function` itself has to join; communicator is null.
[[nodiscard]] std::vector<std::exception_ptr> run_threads(int size, const RankFunction& function,
                                                          const Environment& environment,
                                                          const HostsOfRanks& hosts = {});

// Joins the rank's store under another name than "world".
[[nodiscard]] CommunicatorPtr join_group(const RankOfTest& rank, const std::string& name,
                                         const Environment& environment = test_environment());

// -- what a failed operation says -----------------------------------------------------------------

// Runs `action`, which has to throw an Error, and returns what it was.
[[nodiscard]] ErrorDescription error_of(const std::function<void()>& action);

// For as long as it lives, no thread is to be had: each would get more stack than there is memory.
class NoThreads {
 public:
  NoThreads();
  ~NoThreads();
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  std::size_t usual_bytes_;
};

[[nodiscard]] bool contains(const std::string& text, const std::string& part);

// -- operations -----------------------------------------------------------------------------------

template <typename T>
[[nodiscard]] constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kFloat32;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::kFloat64;
}
template <>
constexpr DType dtype_of<int>() {
  return DType::kInt32;
}
template <>
constexpr DType dtype_of<std::uint8_t>() {
  return DType::kUInt8;
}
template <>
constexpr DType dtype_of<std::uint16_t>() {
  return DType::kBFloat16;
}

template <typename T>
[[nodiscard]] Buffer buffer_of(std::vector<T>& values) {
  return {values.data(), values.size(), dtype_of<T>()};
}

template <typename T>
[[nodiscard]] Operation all_reduce(std::vector<T>& values, ReduceOp op = ReduceOp::kSum) {
  Operation operation;
  operation.kind = OpKind::kAllReduce;
  operation.inputs = {buffer_of(values)};
  operation.outputs = operation.inputs;
  operation.op = op;
  return operation;
}

template <typename T>
[[nodiscard]] Operation broadcast(std::vector<T>& values, int root, bool is_root) {
  Operation operation;
  operation.kind = OpKind::kBroadcast;
  operation.peer = root;
  (is_root ? operation.inputs : operation.outputs).push_back(buffer_of(values));
  return operation;
}

template <typename T>
[[nodiscard]] Operation send_to(int peer, std::uint64_t tag, std::vector<T>& values) {
  Operation operation;
  operation.kind = OpKind::kSend;
  operation.peer = peer;
  operation.tag = tag;
  operation.inputs = {buffer_of(values)};
  return operation;
}

template <typename T>
[[nodiscard]] Operation receive_from(int peer, std::uint64_t tag, std::vector<T>& values) {
  Operation operation;
  operation.kind = OpKind::kRecv;
  operation.peer = peer;
  operation.tag = tag;
  operation.outputs = {buffer_of(values)};
  return operation;
}

[[nodiscard]] inline Operation barrier() { return {}; }

[[nodiscard]] inline Operation with_timeout(Operation operation,
                                            std::chrono::milliseconds timeout) {
  operation.deadline = Deadline::in(timeout);
  return operation;
}

// How much slower than a plain build this one may be: sanitizers stretch every time that a test
// asserts an upper bound of.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowdown = 4;
#else
inline constexpr int kSlowdown = 1;
#endif
// What needs no waiting takes no longer.
inline constexpr std::chrono::milliseconds kAtOnce{1000 * kSlowdown};

}  // namespace pydist::testing
