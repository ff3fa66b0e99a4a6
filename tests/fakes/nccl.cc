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
//   stray       an all-reduce outlives its abort until fake_nccl_end_strays(), and writes then
//   slow_abort  the abort takes a second (as hang_abort)
//   no_register  memory is refused (as hang_abort)
//   split_fail  a split returns an error       split_hang  never ends, on no rank (as hang_abort)

#include "nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "nccl_communicator.h"
#include "nccl_memory.h"
#include "nccl_operators.h"
#include "nccl_values.h"

namespace fake_nccl {
namespace {

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
  Output output = {};  // of an all-reduce
};

std::atomic<int> launches{0};
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
    ++launches;
    const CommPtr comm = calls.front().comm;
    void* const stream = calls.front().stream;
    std::vector<Message> messages;
    std::vector<std::function<void(Comm&)>> collectives;
    std::vector<Output> outputs;
    std::erase_if(calls, [&](const Queued& call) {
      if (call.comm != comm) {
        return false;
      }
      if (call.collective) {
        collectives.push_back(call.collective);
        outputs.push_back(call.output);
      } else {
        messages.push_back(call.message);
      }
      return true;
    });
    const bool hangs = has_fault(*comm, "hang", true);
    const bool is_deaf = has_fault(*comm, "deaf", true);
    const bool is_stray = has_fault(*comm, "stray", true);
    const bool is_late = has_fault(*comm, "late", true);
    const bool times_out = has_fault(*comm, "timeout", true);
    const bool fails = times_out || has_fault(*comm, "async", true);
    if (has_fault(*comm, "exit", true)) {
      std::_Exit(9);
    }
    const std::function<void()> job = [=, ended = times_strays_ended()] {
      if (fails) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // after the call
        comm->async_error = times_out ? kTimeout : kRemoteError;
      }
      if (hangs || fails || is_deaf || is_stray) {
        const auto may_end = [&] { return is_stray && times_strays_ended() > ended; };
        wait_for(*comm, may_end);
        if (is_deaf) {
          std::this_thread::sleep_for(std::chrono::hours(1));
        }
        while (is_stray && !may_end()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (is_stray) {
          write_late(outputs);
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

Result collective(void* comm, void* stream, Shape shape, std::function<void(Comm&)> run,
                  bool is_registered = false, Output output = {}) {
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
                       is_registered,
                       output});
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

int ncclGetVersion(int* version) {
  const char* const text = std::getenv("FAKE_NCCL_VERSION");
  *version = text == nullptr ? 23007 : std::atoi(text);
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
                    is_registered(comm, in) && is_registered(comm, out),
                    {out, count * size_of(type)});
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

int fake_nccl_faults() { return faults_seen.load(); }
int fake_nccl_launches() { return launches.load(); }
}
