// A NCCL without a GPU: ranks are threads or processes of one host, which meet in shared memory;
// what a call enqueues runs on the streams of the fake CUDA driver. It is as slow and as picky as
// it may be: communicators do not block, so calls answer ncclInProgress now and then; what a call
// may not be given is refused with NCCL's own code; and where ranks call different things, the
// collective hangs, as it may. A communicator is not finalized, nor its abort over, before the CUDA
// graphs that hold its operations are gone, and not destroyed before its peers have ended theirs.
// The first collective of each kind is under way until all ranks have called it, since NCCL, from
// 2.22 on, connects them then. What ends a communicator waits for streams and frees memory on a
// thread of the library's own, as NCCL's ncclCommFinalize does, and before about 2.30
// ncclCommDestroy and ncclCommAbort: no capture in global mode survives that, whatever the caller's
// own mode.
//
// FAKE_NCCL_VERSION      what ncclGetVersion says                          (23007)
// NCCL_COMM_BLOCKING=1   calls wait until they are done, as NCCL's do
// NCCL_RUNTIME_CONNECT=0 connections are there from the beginning, as NCCL's are
// FAKE_NVSWITCH=1        the GPUs have one: an all-reduce of registered memory is under way until
//                        all ranks call it, as with NCCL's NVLS, unless NCCL_NVLS_ENABLE=0
// FAKE_NCCL_FAULT        what:rank:n, at the n-th collective of that rank; several by commas. What:
//   fail        the call returns an error      async       an error comes up afterwards: of a peer,
//                                              timeout     of NCCL's own patience
//   hang        the operation never ends       hang_abort  nor does the abort (n is of no matter)
//   init_fail   joining fails                  init_hang   joining never ends
//   exit        the process ends, at once      slow        the call is under way for two seconds
//   hang_finalize  finalizing never ends       slow_deregister  takes a third of a second
//   late_abort  the abort ends the operations, and does not return (as hang_abort)
//   late        the operation ends a second and a half after the other ranks'
//   deaf        the operation never ends, even where it is aborted
//   slow_abort  the abort takes a second (as hang_abort)
//   no_register  memory is refused (as hang_abort)

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "cuda_driver.h"
#include "nccl.h"

namespace {

// Buffers without elements may be null.
void move_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) {
    std::memmove(to, from, bytes);
  }
}

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
enum RedOp { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4, kPreMulSum = 5 };
constexpr int kOpCount = 5;  // that every communicator has; others have greater numbers
constexpr int kScalarHostImmediate = 1;

constexpr int kMostRanks = 8;
constexpr std::size_t kKinds = 5;  // of collectives
constexpr std::size_t kChunk = 1 << 15;

struct Mailbox {
  std::atomic<std::uint64_t> sent;
  std::atomic<std::uint64_t> received;
  std::atomic<std::uint64_t> bytes;
  char data[kChunk];
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
};

struct UniqueId {
  char bytes[128];
};

struct Fault {
  std::string what;
  int rank = -1;
  int at = 0;
};

struct Comm {
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

// What is done to memory and communicators that NCCL does not forgive, and what there is of them.
std::atomic<int> faults_seen{0};
std::mutex communicators_mutex;
// Guarded by communicators_mutex. Never destroyed: an abort may still be under way at exit.
std::set<void*>& communicators = *new std::set<void*>;
std::mutex memory_mutex;
std::map<void*, int> memory;           // how often it is registered; guarded by memory_mutex
std::map<void*, long> memory_bytes;    // guarded by memory_mutex
std::map<void*, void*> registrations;  // memory by communicator; guarded by memory_mutex

// What communicators have been given of ncclRedOpCreatePreMulSum.
struct OwnOp {
  void* comm;
  int type;
  double factor;
};
std::mutex own_ops_mutex;
std::map<int, OwnOp> own_ops;  // by the operator's number; guarded by own_ops_mutex
int next_op = kOpCount;        // guarded by own_ops_mutex

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// With a communicator go its registrations and operators.
void end(void* handle) {
  {
    const std::lock_guard lock(communicators_mutex);
    communicators.erase(handle);
  }
  {
    const std::lock_guard lock(own_ops_mutex);
    std::erase_if(own_ops, [&](const auto& each) { return each.second.comm == handle; });
  }
  const std::lock_guard lock(memory_mutex);
  for (const auto& [data, comm] : registrations) {
    if (comm == handle) {
      memory[data] = 0;
    }
  }
  std::erase_if(registrations, [&](const auto& each) { return each.second == handle; });
}

// What jobs hold; the handle of a communicator is a pointer to one of these.
using CommPtr = std::shared_ptr<Comm>;

// Null where that is none, or has been destroyed.
CommPtr find(void* handle) {
  const std::lock_guard lock(communicators_mutex);
  return communicators.count(handle) == 0 ? nullptr : *static_cast<CommPtr*>(handle);
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

bool has_fault(const Comm& comm, const char* what, bool counts) {
  for (const Fault& fault : comm.faults) {
    if (fault.what == what && fault.rank == comm.rank && (!counts || fault.at == comm.operations)) {
      return true;
    }
  }
  return false;
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

// Waits for `holds`, or for the abort. Returns whether it holds.
bool wait_for(Comm& comm, const std::function<bool()>& holds) {
  while (!holds()) {
    if (comm.is_aborted) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

bool meet(Comm& comm) {
  comm.shared->arrived[comm.rank].store(++comm.arrivals, std::memory_order_release);
  return wait_for(comm, [&comm] {
    for (int rank = 0; rank < comm.size; ++rank) {
      if (comm.shared->arrived[rank].load(std::memory_order_acquire) < comm.arrivals) {
        return false;
      }
    }
    return true;
  });
}

// Shows `bytes` of every rank to every rank, chunk by chunk.
void show_all(
    Comm& comm, const char* mine, std::size_t bytes,
    const std::function<void(int rank, std::size_t begin, const char*, std::size_t)>& use) {
  for (std::size_t begin = 0; begin < bytes; begin += kChunk) {
    const std::size_t count = std::min(kChunk, bytes - begin);
    move_bytes(comm.shared->chunks[comm.rank], mine + begin, count);
    comm.shared->calls[comm.rank] = comm.call;
    if (!meet(comm)) {
      return;
    }
    for (int rank = 0; rank < comm.size; ++rank) {
      if (comm.shared->calls[rank] != comm.call) {
        wait_for(comm, [] { return false; });
        return;
      }
    }
    for (int rank = 0; rank < comm.size; ++rank) {
      use(rank, begin, comm.shared->chunks[rank], count);
    }
    if (!meet(comm)) {
      return;
    }
  }
}

// ---- arithmetic -----------------------------------------------------------------------------

float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  move_bytes(&value, &wide, 4);
  return value;
}

std::uint16_t to_bf16(float value) {
  std::uint32_t bits = 0;
  move_bytes(&bits, &value, 4);
  if (value != value) {
    return 0x7fc0;
  }
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  float value = 0;
  if (exponent == 31) {
    value = fraction != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t to_f16(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (value != value) {
    return 0x7e00;
  }
  if (magnitude >= 65520.0F) {
    return sign | 0x7c00;
  }
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int shift = std::max(exponent - 11, -24);
  // To nearest, ties to even, in units of the last place.
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, -shift)));
  if (units == 0) {
    return sign;
  }
  return static_cast<std::uint16_t>(
      sign +
      (shift == -24 ? units : units - 1024 + (static_cast<std::uint32_t>(shift + 25) << 10)));
}

// Integers wrap around.
template <typename T, typename Op>
T wrapped(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(op(static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)));
  } else {
    return op(a, b);
  }
}

template <typename T>
T combined(T a, T b, int op) {
  switch (op) {
    case kProd:
      return wrapped(a, b, std::multiplies<>());
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return wrapped(a, b, std::plus<>());
  }
}

// total = total op values. 16-bit types round after every step, as NCCL's do.
void accumulate(char* total, const char* values, std::size_t count, int type, int op) {
  const auto run = [&]<typename T>(T) {
    for (std::size_t i = 0; i < count; ++i) {
      T a;
      T b;
      move_bytes(&a, total + i * sizeof(T), sizeof(T));
      move_bytes(&b, values + i * sizeof(T), sizeof(T));
      a = combined(a, b, op);
      move_bytes(total + i * sizeof(T), &a, sizeof(T));
    }
  };
  const auto run_16 = [&](auto from, auto to) {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t a = 0;
      std::uint16_t b = 0;
      move_bytes(&a, total + i * 2, 2);
      move_bytes(&b, values + i * 2, 2);
      a = to(combined(from(a), from(b), op));
      move_bytes(total + i * 2, &a, 2);
    }
  };
  switch (type) {
    case 0:
      run(std::int8_t{});
      break;
    case 1:
      run(std::uint8_t{});
      break;
    case 2:
      run(std::int32_t{});
      break;
    case 3:
      run(std::uint32_t{});
      break;
    case 4:
      run(std::int64_t{});
      break;
    case 5:
      run(std::uint64_t{});
      break;
    case 6:
      run_16(from_f16, to_f16);
      break;
    case 7:
      run(float{});
      break;
    case 8:
      run(double{});
      break;
    default:
      run_16(from_bf16, to_bf16);
      break;
  }
}

// values *= factor, which is rounded to their type first.
void multiply(char* values, std::size_t count, int type, double factor) {
  const auto run = [&]<typename T>(T by) {
    for (std::size_t i = 0; i < count; ++i) {
      T value;
      move_bytes(&value, values + i * sizeof(T), sizeof(T));
      value *= by;
      move_bytes(values + i * sizeof(T), &value, sizeof(T));
    }
  };
  const auto run_16 = [&](auto from, auto to) {
    const float by = from(to(static_cast<float>(factor)));
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t value = 0;
      move_bytes(&value, values + i * 2, 2);
      value = to(from(value) * by);
      move_bytes(values + i * 2, &value, 2);
    }
  };
  switch (type) {
    case 6:
      run_16(from_f16, to_f16);
      break;
    case 7:
      run(static_cast<float>(factor));
      break;
    case 8:
      run(factor);
      break;
    default:
      run_16(from_bf16, to_bf16);
      break;
  }
}

double scalar_at(const void* data, int type) {
  std::uint16_t narrow = 0;
  float single = 0;
  double value = 0;
  switch (type) {
    case 7:
      move_bytes(&single, data, sizeof single);
      return static_cast<double>(single);
    case 8:
      move_bytes(&value, data, sizeof value);
      return value;
    default:
      move_bytes(&narrow, data, sizeof narrow);
      return static_cast<double>(type == 6 ? from_f16(narrow) : from_bf16(narrow));
  }
}

// As a call copies it.
struct Operator {
  int kind;  // -1 where the communicator has no such operator for the type
  double factor = 1.0;
};

Operator operator_of(void* comm, int op, int type) {
  if (op < kOpCount) {
    return {op};
  }
  const std::lock_guard lock(own_ops_mutex);
  const auto found = own_ops.find(op);
  if (found == own_ops.end() || found->second.comm != comm || found->second.type != type) {
    return {-1};
  }
  return {kPreMulSum, found->second.factor};
}

std::size_t size_of(int type) {
  constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

// The combination of all ranks' `count` elements at `in`. NCCL's average of floating point is a sum
// of products, too.
std::vector<char> reduced(Comm& comm, const void* in, std::size_t count, int type, Operator op) {
  std::vector<char> total(count * size_of(type));
  std::vector<char> mine(total.size());
  move_bytes(mine.data(), in, mine.size());
  if (op.kind == kPreMulSum || op.kind == kAvg) {
    multiply(mine.data(), count, type, op.kind == kAvg ? 1.0 / comm.size : op.factor);
  }
  show_all(comm, mine.data(), total.size(),
           [&](int rank, std::size_t begin, const char* values, std::size_t bytes) {
             if (rank == 0) {
               move_bytes(total.data() + begin, values, bytes);
             } else {
               accumulate(total.data() + begin, values, bytes / size_of(type), type, op.kind);
             }
           });
  return total;
}

// ---- launching ------------------------------------------------------------------------------

struct Message {
  bool is_send;
  char* data;
  std::size_t bytes;
  int peer;
};

struct Queued {
  CommPtr comm;
  void* stream;
  std::function<void(Comm&)> collective;  // or
  Message message;
  std::size_t kind = 0;  // of the collective
  bool is_registered = false;
};

thread_local int group_depth = 0;
thread_local std::vector<Queued> queued;

void enqueue(void* stream, const std::function<void()>& job) { fake_driver_enqueue(stream, &job); }

// All messages of a group make progress together.
void exchange(Comm& comm, std::vector<Message> messages) {
  std::vector<std::size_t> done(messages.size(), 0);
  wait_for(comm, [&] {
    bool is_finished = true;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      Message& message = messages[i];
      Mailbox& box = message.is_send ? comm.shared->mail[comm.rank][message.peer]
                                     : comm.shared->mail[message.peer][comm.rank];
      // Messages between two ranks go one after the other.
      bool is_first = true;
      for (std::size_t j = 0; j < i; ++j) {
        is_first &= messages[j].peer != message.peer || messages[j].is_send != message.is_send ||
                    done[j] == messages[j].bytes;
      }
      if (done[i] == message.bytes || !is_first) {
        is_finished &= done[i] == message.bytes;
        continue;
      }
      const std::uint64_t sent = box.sent.load(std::memory_order_acquire);
      const std::uint64_t received = box.received.load(std::memory_order_acquire);
      const std::size_t bytes = std::min(kChunk, message.bytes - done[i]);
      if (message.is_send && sent == received) {
        move_bytes(box.data, message.data + done[i], bytes);
        box.bytes.store(bytes, std::memory_order_relaxed);
        box.sent.store(sent + 1, std::memory_order_release);
        done[i] += bytes;
      } else if (!message.is_send && sent > received) {
        if (box.bytes.load(std::memory_order_relaxed) != bytes) {
          std::fprintf(stderr, "fake NCCL: a message of %zu bytes was expected to have %zu\n",
                       static_cast<std::size_t>(box.bytes.load()), bytes);
          std::abort();
        }
        move_bytes(message.data + done[i], box.data, bytes);
        box.received.store(received + 1, std::memory_order_release);
        done[i] += bytes;
      }
      is_finished &= done[i] == message.bytes;
    }
    return is_finished;
  });
}

void launch(std::vector<Queued> calls) {
  while (!calls.empty()) {
    const CommPtr comm = calls.front().comm;
    void* const stream = calls.front().stream;
    std::vector<Message> messages;
    std::vector<std::function<void(Comm&)>> collectives;
    std::erase_if(calls, [&](const Queued& call) {
      if (call.comm != comm) {
        return false;
      }
      if (call.collective) {
        collectives.push_back(call.collective);
      } else {
        messages.push_back(call.message);
      }
      return true;
    });
    const bool hangs = has_fault(*comm, "hang", true);
    const bool is_deaf = has_fault(*comm, "deaf", true);
    const bool is_late = has_fault(*comm, "late", true);
    const bool times_out = has_fault(*comm, "timeout", true);
    const bool fails = times_out || has_fault(*comm, "async", true);
    if (has_fault(*comm, "exit", true)) {
      std::_Exit(9);
    }
    const std::function<void()> job = [=] {
      if (fails) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // after the call
        comm->async_error = times_out ? kTimeout : kRemoteError;
      }
      if (hangs || fails || is_deaf) {
        wait_for(*comm, [] { return false; });
        if (is_deaf) {
          std::this_thread::sleep_for(std::chrono::hours(1));
        }
        return;
      }
      for (const auto& collective : collectives) {
        collective(*comm);
      }
      exchange(*comm, messages);
      if (is_late) {
        wait_for(*comm, [until_ms = now_ms() + 1500] { return now_ms() >= until_ms; });
      }
    };
    // A graph, and what is replayed of it, holds what it was given.
    ++comm->graphs;
    const std::shared_ptr<void> held(nullptr, [comm](void*) { --comm->graphs; });
    const std::function<void()> captured = [job, held] { job(); };
    if (fake_driver_record(stream, &captured) == 0) {
      enqueue(stream, job);
    }
  }
}

void connect_for(const Queued& call) {
  Comm& comm = *call.comm;
  if (call.collective && comm.connects_at_first_use &&
      !comm.has_connected[call.kind].exchange(true)) {
    ++comm.shared->connecting[call.kind];
  }
  if (call.is_registered && comm.has_nvls) {
    ++comm.called_by_nvls;
    ++comm.shared->called_by_nvls;
  }
}

bool is_connecting(const Comm& comm) {
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    if (comm.has_connected[kind] && comm.shared->connecting[kind] < comm.size) {
      return true;
    }
  }
  return comm.shared->called_by_nvls < comm.called_by_nvls * static_cast<std::uint64_t>(comm.size);
}

// What a communicator says before a call, and answers the question for errors.
Result state_of(Comm& comm) {
  if (comm.async_error != kSuccess) {
    return static_cast<Result>(comm.async_error.load());
  }
  const bool is_busy =
      comm.shared->joined < comm.size || comm.never_joins || comm.never_finalizes ||
      (comm.is_finalized && (comm.graphs != 0 || comm.shared->finalized < comm.size)) ||
      now_ms() < comm.busy_until_ms || comm.slow_answers > 0 || is_connecting(comm);
  return is_busy ? kInProgress : kSuccess;
}

// In the words of NCCL's own check: what is under way has to be waited for.
Result refusal_of(Comm& comm) {
  const Result state = state_of(comm);
  return state == kInProgress ? kInvalidArgument : state;
}

// Calls of a communicator that blocks return once they are connected.
void finish_connecting(Comm& comm) {
  if (comm.is_blocking) {
    wait_for(comm, [&comm] { return !is_connecting(comm); });
  }
}

Result submit(void* handle, void* stream, Queued call) {
  call.comm = find(handle);
  if (call.comm == nullptr) {
    return kInvalidArgument;
  }
  call.stream = stream;
  Comm& comm = *call.comm;
  if (const Result refusal = refusal_of(comm); refusal != kSuccess) {
    return refusal;
  }
  if (call.message.peer < 0 || call.message.peer >= comm.size) {
    return kInvalidArgument;
  }
  const void* const context = fake_driver_context_of(stream);
  if (context != nullptr && context != comm.context) {
    return kUnhandledCudaError;
  }
  if (group_depth == 0 || queued.empty()) {
    ++comm.operations;
  }
  if (has_fault(comm, "fail", true)) {
    return kSystemError;
  }
  if (group_depth > 0) {
    queued.push_back(std::move(call));
    return kSuccess;
  }
  connect_for(call);
  comm.slow_answers = comm.is_blocking ? 0 : 1;
  if (has_fault(comm, "slow", true)) {
    comm.busy_until_ms = now_ms() + 2000;
  }
  launch({std::move(call)});
  finish_connecting(comm);
  return comm.is_blocking ? kSuccess : kInProgress;
}

// What ranks have to call alike.
struct Shape {
  int kind;
  std::size_t count;
  int type;
  int op = 0;
  int root = 0;

  [[nodiscard]] bool is_valid(const Comm& comm) const {
    return type >= 0 && type <= 9 && op >= 0 && op <= kPreMulSum && root >= 0 && root < comm.size;
  }
  [[nodiscard]] std::uint64_t in_short() const {
    std::uint64_t value = count;
    for (const int each : {kind, type, op, root}) {
      value = value * 31 + static_cast<std::uint64_t>(each);
    }
    return value;
  }
};

bool is_registered(void* comm, const void* data) {
  const std::lock_guard lock(memory_mutex);
  return std::any_of(registrations.begin(), registrations.end(), [&](const auto& each) {
    const auto* const begin = static_cast<const char*>(each.first);
    return each.second == comm && data >= begin && data < begin + memory_bytes[each.first];
  });
}

Result collective(void* comm, void* stream, Shape shape, std::function<void(Comm&)> run,
                  bool is_registered = false) {
  if (const CommPtr known = find(comm); known != nullptr && !shape.is_valid(*known)) {
    return kInvalidArgument;
  }
  return submit(comm, stream,
                Queued{nullptr,
                       nullptr,
                       [shape, run = std::move(run)](Comm& self) {
                         self.call = shape.in_short();
                         run(self);
                       },
                       {},
                       static_cast<std::size_t>(shape.kind),
                       is_registered});
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  const char* const text = std::getenv("FAKE_NCCL_VERSION");
  *version = text == nullptr ? 23007 : std::atoi(text);
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/fake-nccl-%08x%08x", random(), random());
  return kSuccess;
}

int ncclCommInitRankConfig(void** handle, int size, UniqueId id, int rank, void* config) {
  unsigned magic = 0;
  move_bytes(&magic, static_cast<char*>(config) + sizeof(std::size_t), sizeof magic);
  if (magic != 0xcafebeef || size > kMostRanks) {
    return kInvalidArgument;
  }
  if (size < 1 || rank < 0 || rank >= size) {
    return kInvalidArgument;
  }
  auto comm = std::make_shared<Comm>();
  comm->faults = faults();
  comm->context = fake_driver_current_context();
  if (comm->context == nullptr) {
    return kUnhandledCudaError;
  }
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
  const int fd = ::shm_open(id.bytes, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ::ftruncate(fd, sizeof(Shared)) != 0) {
    return kSystemError;
  }
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  comm->shared = static_cast<Shared*>(memory);
  comm->never_joins = has_fault(*comm, "init_hang", false);
  if (!comm->never_joins && ++comm->shared->joined == size) {
    ::shm_unlink(id.bytes);
  }
  if (comm->is_blocking) {
    wait_for(*comm, [&comm] { return state_of(*comm) == kSuccess; });
  }
  const Result result = comm->is_blocking ? kSuccess : kInProgress;
  *handle = new CommPtr(std::move(comm));
  const std::lock_guard lock(communicators_mutex);
  communicators.insert(*handle);
  return result;
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

const char* ncclGetErrorString(int result) {
  switch (result) {
    case kUnhandledCudaError:
      return "unhandled cuda error";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kTimeout:
      return "timeout";
    default:
      return "unhandled system error";
  }
}
const char* ncclGetLastError(void*) { return "said by the fake"; }

int ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (group_depth == 0) {
    return kInvalidUsage;
  }
  if (--group_depth > 0) {
    return kSuccess;
  }
  std::vector<Queued> calls;
  calls.swap(queued);
  bool is_over = true;
  std::set<CommPtr> comms;
  for (const Queued& call : calls) {
    call.comm->slow_answers = call.comm->is_blocking ? 0 : 1;
    is_over &= call.comm->is_blocking;
    connect_for(call);
    comms.insert(call.comm);
  }
  launch(std::move(calls));
  for (const CommPtr& comm : comms) {
    finish_connecting(*comm);
  }
  return is_over ? kSuccess : kInProgress;
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, void* handle) {
  const CommPtr comm = find(handle);
  if (comm == nullptr || residence != kScalarHostImmediate || type < 6 || type > 9) {
    return kInvalidArgument;
  }
  if (const Result refusal = refusal_of(*comm); refusal != kSuccess) {
    return refusal;
  }
  const std::lock_guard lock(own_ops_mutex);
  own_ops[next_op] = {handle, type, scalar_at(scalar, type)};
  *op = next_op++;
  return kSuccess;
}

int ncclRedOpDestroy(int op, void* comm) {
  const std::lock_guard lock(own_ops_mutex);
  const auto found = own_ops.find(op);
  if (found == own_ops.end() || found->second.comm != comm) {
    return kInvalidArgument;
  }
  own_ops.erase(found);
  return kSuccess;
}

int ncclAllReduce(const void* in, void* out, std::size_t count, int type, int op, void* comm,
                  void* stream) {
  const Operator by = operator_of(comm, op, type);
  const auto run = [=](Comm& self) {
    const std::vector<char> total = reduced(self, in, count, type, by);
    if (!self.is_aborted) {
      move_bytes(out, total.data(), total.size());
    }
  };
  return collective(comm, stream, {0, count, type, by.kind}, run,
                    is_registered(comm, in) && is_registered(comm, out));
}

int ncclReduce(const void* in, void* out, std::size_t count, int type, int op, int root, void* comm,
               void* stream) {
  const Operator by = operator_of(comm, op, type);
  return collective(comm, stream, {1, count, type, by.kind, root}, [=](Comm& self) {
    const std::vector<char> total = reduced(self, in, count, type, by);
    if (!self.is_aborted && self.rank == root) {
      move_bytes(out, total.data(), total.size());
    }
  });
}

int ncclReduceScatter(const void* in, void* out, std::size_t count, int type, int op, void* comm,
                      void* stream) {
  const Operator by = operator_of(comm, op, type);
  return collective(comm, stream, {2, count, type, by.kind}, [=](Comm& self) {
    const std::size_t all = count * static_cast<std::size_t>(self.size);
    const std::vector<char> total = reduced(self, in, all, type, by);
    if (!self.is_aborted) {
      const std::size_t bytes = count * size_of(type);
      move_bytes(out, total.data() + static_cast<std::size_t>(self.rank) * bytes, bytes);
    }
  });
}

int ncclAllGather(const void* in, void* out, std::size_t count, int type, void* comm,
                  void* stream) {
  return collective(comm, stream, {3, count, type}, [=](Comm& self) {
    const std::size_t bytes = count * size_of(type);
    // The input may lie inside of the output.
    const std::vector<char> mine(static_cast<const char*>(in),
                                 static_cast<const char*>(in) + bytes);
    show_all(self, mine.data(), bytes,
             [&](int rank, std::size_t begin, const char* values, std::size_t length) {
               move_bytes(static_cast<char*>(out) + static_cast<std::size_t>(rank) * bytes + begin,
                          values, length);
             });
  });
}

int ncclBroadcast(const void* in, void* out, std::size_t count, int type, int root, void* comm,
                  void* stream) {
  return collective(comm, stream, {4, count, type, 0, root}, [=](Comm& self) {
    const char* const mine = static_cast<const char*>(self.rank == root ? in : out);
    show_all(self, mine, count * size_of(type),
             [&](int rank, std::size_t begin, const char* values, std::size_t length) {
               if (rank == root) {
                 move_bytes(static_cast<char*>(out) + begin, values, length);
               }
             });
  });
}

int ncclSend(const void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  auto* const bytes = static_cast<char*>(const_cast<void*>(data));
  return submit(comm, stream,
                {nullptr, nullptr, nullptr, {true, bytes, count * size_of(type), peer}});
}

int ncclRecv(void* data, std::size_t count, int type, int peer, void* comm, void* stream) {
  return submit(
      comm, stream,
      {nullptr, nullptr, nullptr, {false, static_cast<char*>(data), count * size_of(type), peer}});
}

int ncclMemAlloc(void** data, std::size_t bytes) {
  if (fake_driver_reserve(static_cast<long>(bytes)) == 0) {
    return kUnhandledCudaError;
  }
  *data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(*data, 0xff, bytes);
  const std::lock_guard lock(memory_mutex);
  memory[*data] = 0;
  memory_bytes[*data] = static_cast<long>(bytes);
  return kSuccess;
}

int ncclMemFree(void* data) {
  const std::lock_guard lock(memory_mutex);
  if (memory.count(data) == 0) {
    return kInvalidArgument;
  }
  if (memory[data] != 0) {
    ++faults_seen;  // a communicator would use it for whatever comes to lie there
  }
  memory.erase(data);
  fake_driver_reserve(-memory_bytes[data]);
  memory_bytes.erase(data);
  std::free(data);
  return kSuccess;
}

int ncclCommRegister(void* comm, void* data, std::size_t, void** handle) {
  const CommPtr owner = find(comm);
  if (owner == nullptr) {
    return kInvalidArgument;
  }
  if (has_fault(*owner, "no_register", false)) {
    return kSystemError;
  }
  const std::lock_guard lock(memory_mutex);
  *handle = data;
  ++memory[data];
  registrations[data] = comm;
  return kSuccess;
}

int ncclCommDeregister(void* handle, void* data) {
  const CommPtr comm = find(handle);
  if (comm == nullptr) {
    return kInvalidArgument;
  }
  {
    const std::lock_guard lock(memory_mutex);
    if (const auto found = registrations.find(data);
        found == registrations.end() || found->second != handle) {
      return kInvalidUsage;
    }
  }
  ++comm->calls;
  if (has_fault(*comm, "slow_deregister", false)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  --comm->calls;
  const std::lock_guard lock(memory_mutex);
  --memory[data];
  registrations.erase(data);
  return kSuccess;
}

int fake_nccl_faults() { return faults_seen.load(); }
int fake_nccl_communicators() {
  const std::lock_guard lock(communicators_mutex);
  return static_cast<int>(communicators.size());
}
int fake_nccl_operators() {
  const std::lock_guard lock(own_ops_mutex);
  return static_cast<int>(own_ops.size());
}
int fake_nccl_registrations() {
  const std::lock_guard lock(memory_mutex);
  return static_cast<int>(registrations.size());
}
int fake_nccl_blocks() {
  const std::lock_guard lock(memory_mutex);
  return static_cast<int>(memory.size());
}
}
