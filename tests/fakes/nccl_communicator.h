// The fake NCCL's communicators: ranks that meet in shared memory, and the faults that a test asked
// for.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fake_nccl {

// As NCCL numbers them.
enum Result {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8
};

constexpr int kMostRanks = 8;
constexpr std::size_t kKinds = 5;  // of collectives
constexpr std::size_t kChunk = 1 << 15;

struct Mailbox {
  std::atomic<std::uint64_t> sent;
  std::atomic<std::uint64_t> received;
  std::atomic<std::uint64_t> bytes;
  char data[kChunk];
};

constexpr int kMostSplits = 64;

// What the ranks of a communicator say when they split it.
struct Split {
  std::atomic<int> arrived;
  int colors[kMostRanks];
  int keys[kMostRanks];
};

struct Shared {
  std::atomic<int> joined;
  std::atomic<int> finalized;  // have begun to finalize their communicators, or have aborted them
  std::atomic<int> left;       // have ended their communicators, or begun to
  std::atomic<int> connecting[kKinds];        // ranks that have called a collective of the kind
  std::atomic<std::uint64_t> called_by_nvls;  // times that a rank has
  std::atomic<std::uint64_t> arrived[kMostRanks];
  std::uint64_t calls[kMostRanks];  // what each rank's collective is, in short
  char chunks[kMostRanks][kChunk];
  Mailbox mail[kMostRanks][kMostRanks];  // from, to
  Split splits[kMostSplits];
};

struct Fault {
  std::string what;
  int rank = -1;
  int at = 0;
};

struct Comm {
  std::string id;
  int splits = 0;  // that this rank has begun
  // Where the communicator goes that is being split off, once all ranks have come; or null.
  std::atomic<void**> child{nullptr};
  std::vector<Fault> faults;  // as they were when it was made
  int rank = 0;
  int size = 1;
  Shared* shared = nullptr;
  const void* context = nullptr;  // CUDA's, that it was made in
  bool is_blocking = false;
  bool connects_at_first_use = true;
  std::atomic<bool> has_connected[kKinds]{};  // or is doing so
  bool has_nvls = false;
  std::atomic<std::uint64_t> called_by_nvls{0};  // times that this rank has
  std::atomic<bool> is_finalized{false};
  std::uint64_t arrivals = 0;  // by the stream's thread
  std::uint64_t call = 0;      // by the stream's thread
  std::atomic<bool> is_aborted{false};
  std::atomic<int> async_error{kSuccess};
  std::atomic<int> slow_answers{0};
  std::atomic<bool> never_joins{false};
  std::atomic<bool> never_finalizes{false};
  std::atomic<std::int64_t> busy_until_ms{0};
  std::atomic<int> calls{0};   // under way that an abort has to wait for
  std::atomic<int> graphs{0};  // operations that CUDA graphs hold
  int operations = 0;
};

// What NCCL does not forgive and has been done: see fake_nccl_faults().
extern std::atomic<int> faults_seen;

std::int64_t now_ms();

// What jobs hold; the handle of a communicator is a pointer to one of these.
using CommPtr = std::shared_ptr<Comm>;

// Null where that is none, or has been destroyed.
CommPtr find(void* handle);

// Whether the rank is to suffer it; `counts`: at the collective that it is at.
bool has_fault(const Comm& comm, const char* what, bool counts);

// Waits for `holds`, or for the abort. Returns whether it holds.
bool wait_for(Comm& comm, const std::function<bool()>& holds);

// Whether it is a configuration of NCCL's.
bool is_config(const void* config);

// Makes a communicator, of the ranks that give the same name.
Result join(void** handle, int size, const std::string& id, int rank, const void* context);

// Whether a collective of this rank waits until all ranks have called it.
bool is_connecting(const Comm& comm);

// What a communicator says before a call, and answers the question for errors.
Result state_of(Comm& comm);

// In the words of NCCL's own check: what is under way has to be waited for.
Result refusal_of(Comm& comm);

}  // namespace fake_nccl
