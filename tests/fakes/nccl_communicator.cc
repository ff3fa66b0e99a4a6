// Communicators of the fake NCCL: how they begin, answer and end.

#include "nccl_communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "cuda_driver.h"
#include "nccl.h"
#include "nccl_memory.h"
#include "nccl_operators.h"
#include "nccl_values.h"

namespace fake_nccl {

std::atomic<int> faults_seen{0};

namespace {

struct UniqueId {
  char bytes[128];
};

std::mutex communicators_mutex;
// Guarded by communicators_mutex. Never destroyed: an abort may still be under way at exit.
std::set<void*>& communicators = *new std::set<void*>;
std::atomic<int> made{0};
std::atomic<int> split_off{0};

// With a communicator go its registrations and operators.
void end(void* handle) {
  {
    const std::lock_guard lock(communicators_mutex);
    communicators.erase(handle);
  }
  forget_operators_of(handle);
  forget_memory_of(handle);
}

std::vector<Fault> faults() {
  std::vector<Fault> all;
  const char* const text = std::getenv("FAKE_NCCL_FAULT");
  std::istringstream stream(text == nullptr ? "" : text);
  for (std::string item; std::getline(stream, item, ',');) {
    std::istringstream parts(item);
    Fault fault;
    std::string number;
    std::getline(parts, fault.what, ':');
    std::getline(parts, number, ':');
    fault.rank = std::atoi(number.c_str());
    std::getline(parts, number, ':');
    fault.at = std::atoi(number.c_str());
    all.push_back(fault);
  }
  return all;
}

// What ends a communicator waits for that is not its own; a peer may have died.
constexpr std::int64_t kEndPatienceMs = 60'000;

void wait_at_the_end(const std::function<bool()>& holds) {
  const std::int64_t until_ms = now_ms() + kEndPatienceMs;
  while (!holds() && now_ms() < until_ms) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// As cudaStreamSynchronize and cudaFreeHost do; not for the caller's thread, which may have relaxed
// what captures forbid.
void tear_down_on_own_thread() {
  std::thread([] { fake_driver_permits_unsafe_call(); }).join();
}

}  // namespace

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

CommPtr find(void* handle) {
  const std::lock_guard lock(communicators_mutex);
  return communicators.count(handle) == 0 ? nullptr : *static_cast<CommPtr*>(handle);
}

bool has_fault(const Comm& comm, const char* what, bool counts) {
  for (const Fault& fault : comm.faults) {
    if (fault.what == what && fault.rank == comm.rank && (!counts || fault.at == comm.operations)) {
      return true;
    }
  }
  return false;
}

bool wait_for(Comm& comm, const std::function<bool()>& holds) {
  while (!holds()) {
    if (comm.is_aborted) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

bool is_config(const void* config) {
  unsigned magic = 0;
  move_bytes(&magic, static_cast<const char*>(config) + sizeof(std::size_t), sizeof magic);
  return magic == 0xcafebeef;
}

Result join(void** handle, int size, const std::string& id, int rank, const void* context) {
  auto comm = std::make_shared<Comm>();
  comm->id = id;
  comm->faults = faults();
  comm->context = context;
  const char* const blocking = std::getenv("NCCL_COMM_BLOCKING");
  comm->is_blocking = blocking != nullptr && std::strcmp(blocking, "1") == 0;
  const char* const connect = std::getenv("NCCL_RUNTIME_CONNECT");
  comm->connects_at_first_use = connect == nullptr || std::strcmp(connect, "0") != 0;
  const char* const nvls = std::getenv("NCCL_NVLS_ENABLE");
  comm->has_nvls =
      std::getenv("FAKE_NVSWITCH") != nullptr && (nvls == nullptr || std::strcmp(nvls, "0") != 0);
  comm->rank = rank;
  comm->size = size;
  if (has_fault(*comm, "init_fail", false)) {
    return kSystemError;
  }
  const int fd = ::shm_open(id.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ::ftruncate(fd, sizeof(Shared)) != 0) {
    return kSystemError;
  }
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  comm->shared = static_cast<Shared*>(memory);
  comm->never_joins = has_fault(*comm, "init_hang", false);
  if (!comm->never_joins && ++comm->shared->joined == size) {
    ::shm_unlink(id.c_str());
  }
  if (comm->is_blocking) {
    wait_for(*comm, [&comm] { return state_of(*comm) == kSuccess; });
  }
  const Result result = comm->is_blocking ? kSuccess : kInProgress;
  ++made;
  auto* const joined = new CommPtr(std::move(comm));
  {
    const std::lock_guard lock(communicators_mutex);
    communicators.insert(joined);
  }
  *handle = joined;
  return result;
}

bool is_connecting(const Comm& comm) {
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    if (comm.has_connected[kind] && comm.shared->connecting[kind] < comm.size) {
      return true;
    }
  }
  return comm.shared->called_by_nvls < comm.called_by_nvls * static_cast<std::uint64_t>(comm.size);
}

// Makes the communicator that is being split off, once all ranks have come. Returns whether that
// is still to happen.
bool is_splitting(Comm& comm) {
  if (comm.child == nullptr) {
    return false;
  }
  const Split& split = comm.shared->splits[comm.splits - 1];
  if (split.arrived < comm.size) {
    return true;
  }
  const int color = split.colors[comm.rank];
  int rank = 0;
  int size = 0;
  for (int other = 0; other < comm.size; ++other) {
    if (split.colors[other] == color) {
      ++size;
      rank += std::make_pair(split.keys[other], other) <
                      std::make_pair(split.keys[comm.rank], comm.rank)
                  ? 1
                  : 0;
    }
  }
  void** const child = comm.child.exchange(nullptr);
  if (child != nullptr && color >= 0) {
    ++split_off;
    const std::string id =
        comm.id + "-" + std::to_string(comm.splits) + "-" + std::to_string(color);
    if (const Result result = join(child, size, id, rank, comm.context);
        result > kSuccess && result != kInProgress) {
      comm.async_error = result;
    }
  }
  return false;
}

Result state_of(Comm& comm) {
  const bool splits = is_splitting(comm);
  if (comm.async_error != kSuccess) {
    return static_cast<Result>(comm.async_error.load());
  }
  const bool is_busy =
      comm.shared->joined < comm.size || comm.never_joins || comm.never_finalizes ||
      (comm.is_finalized && (comm.graphs != 0 || comm.shared->finalized < comm.size)) ||
      now_ms() < comm.busy_until_ms || comm.slow_answers > 0 || is_connecting(comm) || splits;
  return is_busy ? kInProgress : kSuccess;
}

Result refusal_of(Comm& comm) {
  const Result state = state_of(comm);
  return state == kInProgress ? kInvalidArgument : state;
}

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/fake-nccl-%08x%08x", random(), random());
  return kSuccess;
}

int ncclCommInitRankConfig(void** handle, int size, UniqueId id, int rank, void* config) {
  if (!is_config(config) || size > kMostRanks || size < 1 || rank < 0 || rank >= size) {
    return kInvalidArgument;
  }
  const void* const context = fake_driver_current_context();
  if (context == nullptr) {
    return kUnhandledCudaError;
  }
  return join(handle, size, id.bytes, rank, context);
}

// Collective over the parent, which is busy until all of its ranks have come; only then there is a
// child. Of color -1 (NCCL_SPLIT_NOCOLOR) there is none.
int ncclCommSplit(void* parent, int color, int key, void** child, void* config) {
  const CommPtr comm = find(parent);
  if (comm == nullptr || color < -1 || (config != nullptr && !is_config(config)) ||
      comm->splits == kMostSplits) {
    return kInvalidArgument;
  }
  if (const Result refusal = refusal_of(*comm); refusal != kSuccess) {
    return refusal;
  }
  if (has_fault(*comm, "split_fail", false)) {
    return kSystemError;
  }
  *child = nullptr;
  Split& split = comm->shared->splits[comm->splits++];
  split.colors[comm->rank] = color;
  split.keys[comm->rank] = key;
  comm->child = child;
  split.arrived += has_fault(*comm, "split_hang", false) ? 0 : 1;
  if (comm->is_blocking) {
    wait_for(*comm, [&comm] { return state_of(*comm) != kInProgress; });
  }
  return comm->is_blocking ? kSuccess : kInProgress;
}

int ncclCommGetAsyncError(void* handle, int* state) {
  const CommPtr comm = find(handle);
  if (comm == nullptr) {
    return kInvalidArgument;
  }
  *state = state_of(*comm);
  if (comm->slow_answers > 0) {
    --comm->slow_answers;
  }
  return kSuccess;
}

int ncclCommFinalize(void* handle) {
  const CommPtr comm = find(handle);
  if (comm == nullptr || comm->is_finalized) {
    return kInvalidArgument;
  }
  if (const Result refusal = refusal_of(*comm); refusal != kSuccess) {
    return refusal;
  }
  tear_down_on_own_thread();
  comm->is_finalized = true;
  ++comm->shared->finalized;
  comm->slow_answers = comm->is_blocking ? 0 : 2;
  comm->never_finalizes = has_fault(*comm, "hang_finalize", false);
  if (comm->is_blocking) {
    wait_for(*comm, [&comm] { return state_of(*comm) != kInProgress; });
  }
  return comm->is_blocking ? kSuccess : kInProgress;
}

// Jobs may still hold the communicator; its memory stays mapped.
int ncclCommDestroy(void* handle) {
  const CommPtr comm = find(handle);
  if (comm == nullptr) {
    return kInvalidArgument;
  }
  if (const Result refusal = refusal_of(*comm); refusal != kSuccess) {
    return refusal;
  }
  tear_down_on_own_thread();
  ++comm->shared->left;
  wait_at_the_end([&comm] { return comm->shared->left >= comm->size; });
  tear_down_on_own_thread();
  end(handle);
  delete static_cast<CommPtr*>(handle);
  return kSuccess;
}

int ncclCommAbort(void* handle) {
  const CommPtr found = find(handle);
  if (found == nullptr) {
    return kInvalidArgument;
  }
  Comm& comm = *found;
  if (has_fault(comm, "hang_abort", false)) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  if (has_fault(comm, "slow_abort", false)) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  comm.is_aborted = true;
  tear_down_on_own_thread();
  if (!comm.is_finalized) {
    ++comm.shared->finalized;
  }
  ++comm.shared->left;
  if (comm.calls != 0) {
    ++faults_seen;  // of which it takes away the communicator
  }
  if (has_fault(comm, "late_abort", false)) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  wait_at_the_end([&comm] { return comm.graphs == 0; });
  tear_down_on_own_thread();
  end(handle);
  delete static_cast<CommPtr*>(handle);
  return kSuccess;
}

int fake_nccl_communicators_made() { return made.load(); }
int fake_nccl_communicators_split() { return split_off.load(); }

int fake_nccl_communicators() {
  const std::lock_guard lock(communicators_mutex);
  return static_cast<int>(communicators.size());
}
}
