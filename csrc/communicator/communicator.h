// THE SEAM between what moves bytes and what needs them moved.
//
// A Communicator is one group of ranks on one backend. Everything above (the torch bridge, the
// reducer, the sharded optimizer) knows this interface alone; a new backend is one implementation.
//
// Order. Collectives of a group start in submission order, the same on every rank, and complete in
// it. Point-to-point operations match by (peer, tag), in order within one such pair, and progress
// independently of collectives and of each other. Groups progress independently.
//
// Threads. Every function may be called from any thread. When several threads submit collectives
// to one group, the callers see to it that the order is the same on every rank.
//
// Failure. An error that leaves the ranks out of step (a lost peer, a mismatch, a timeout, an
// abort) fails every operation of the group that is under way, here and on every other rank, and
// every later one; the group is of no further use, the process is.

#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "communicator/operation.h"
#include "communicator/work.h"

namespace pydist {

// Memory that a communicator allocated; freed with the last reference. On backends with symmetric
// memory, a block is reused once every rank has freed it.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  [[nodiscard]] virtual void* data() const noexcept = 0;
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
  // Whether collectives on it copy nothing in or out.
  [[nodiscard]] virtual bool is_symmetric() const noexcept = 0;
};

using MemoryPtr = std::shared_ptr<Memory>;

// What a backend can do and what it guarantees; identical on all ranks of a group.
struct Capabilities {
  std::string backend;
  std::vector<Device> devices;
  bool spans_hosts = false;  // its ranks are on several, as the engine tells hosts apart
  bool symmetric_memory = false;
  bool any_source = false;
  bool ragged = false;  // blocks of different sizes in all_gather, gather and all_to_all
  // Operations on devices need this rank's host while they run, so no CUDA graph can hold them.
  bool needs_host = false;
  // Operations take Operation::device_factor, which the kernels read that convert for NCCL: NCCL
  // itself would take it in the elements' type, which may have 8 bits, and the ring has others.
  bool takes_device_factors = false;
  // What joining has taken of the device's memory.
  std::size_t device_bytes = 0;
  std::vector<DType> wire_dtypes;
  // The result of a reduction is the same, bit by bit, ...
  bool equal_on_all_ranks = false;
  bool equal_from_run_to_run = false;
  bool equal_for_all_chunkings = false;
  // In which order, and in what precision, elements are combined; for people.
  std::string numerics;
};

class AllocationHeap;
class Communicator;
class PeerNews;
using CommunicatorPtr = std::shared_ptr<Communicator>;

class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  // Unique among the process's groups; the same on every rank of the group.
  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  [[nodiscard]] virtual Capabilities capabilities() const = 0;

  // Whether its operations may have memory of such devices: as capabilities() says, at no cost.
  [[nodiscard]] virtual bool takes(DeviceType type) const;

  // Whether the backend can run `kind` with `op` on `dtype`; an empty string, or why not.
  [[nodiscard]] virtual std::string why_unsupported(OpKind kind, ReduceOp op,
                                                    DType dtype) const = 0;

  // Throws where submit() would refuse the operation at a look: InvalidUsage where it is malformed
  // or on a device that the group does not take, the group's error where the group has failed.
  virtual void check(const Operation& operation) const = 0;

  // Starts an operation. Throws what check() does, or why the system lets it not start (no thread,
  // no memory); then nobody uses its buffers.
  [[nodiscard]] virtual WorkPtr submit(Operation operation) = 0;

  // Starts several in order, all or nothing. Returns a work for each; those that a backend runs as
  // one share theirs. All are looked at before any starts: where one is refused, none has begun,
  // and the group is as it was. Where one cannot start after others have (no thread, no memory, a
  // peer has died), the group fails on every rank, with this rank or that peer as the culprit. When
  // this throws, nobody uses the buffers of any.
  [[nodiscard]] virtual std::vector<WorkPtr> submit_grouped(std::vector<Operation> operations);

  // For a caller that starts several operations of which none is of use without the rest, in the
  // handler of what one of them has thrown. Fails the group with that exception on every rank, and
  // waits until the operations that have started have ended, so that their buffers may go. Returns
  // what to throw: the exception, or an interruption of the wait. Where none has started it does
  // nothing.
  [[nodiscard]] std::exception_ptr fail_started(std::span<const WorkPtr> started);

  // Starts an operation and waits for it; backends may take a shorter way than submit. Returns the
  // source rank of a receive, otherwise -1. An interruption (base/interruption.h) aborts the group,
  // since the caller gets its buffers back. The operation is moved from where it has to be kept.
  virtual int run(Operation&& operation);
  int run(const Operation& operation) { return run(Operation(operation)); }
  // For run(): waits for an operation that has started; returns what run() does.
  int wait_for(Work& work, OpKind kind);
  // For run(): aborts the group because the user has ended the wait for an operation.
  void abort_interrupted(OpKind kind);

  // Collective: every rank of the group calls with the same size, in the same order relative to
  // the group's other collectives. Zero bytes are allowed.
  [[nodiscard]] virtual MemoryPtr allocate(std::size_t bytes, Device device) = 0;

  // Collective: gives memory back to the system that every rank has freed before it calls.
  virtual void trim() {}

  // Collective: lets the ranks of each host read each other's allocation heaps (memory/
  // allocation_heap.h), so that collectives on memory from there copy nothing through slots. All or
  // nothing: where it fails on one rank, all throw. Returns this process's heap, made at the first
  // call; null where nothing is shared: on other backends, or if no other rank is on this host.
  //
  // `max_bytes` of the heap; nothing: a part of what the host has. `refusal`: why this rank cannot
  // take part, which all ranks throw then; empty where it can.
  [[nodiscard]] virtual std::shared_ptr<AllocationHeap> share_allocations(
      std::optional<std::size_t> /*max_bytes*/, const std::string& /*refusal*/) {
    return nullptr;
  }

  // This process's addresses of [data, data + bytes) on each rank; the group allocated that memory.
  // Empty where the group did not, or where its ranks share no memory. No operation orders reads
  // and writes through these addresses: they are for measurements and diagnosis.
  [[nodiscard]] virtual std::vector<std::byte*> symmetric_addresses(const void* /*data*/,
                                                                    std::size_t /*bytes*/) const {
    return {};
  }

  // A group of the given ranks of this one, in that order. Collective among those ranks alone; the
  // caller is one of them.
  [[nodiscard]] virtual CommunicatorPtr split(const std::vector<int>& ranks) = 0;
  // The same, for memory of the host alone: takes nothing of a device.
  [[nodiscard]] virtual CommunicatorPtr split_on_host(const std::vector<int>& ranks) {
    return split(ranks);
  }

  // How long an operation without a deadline of its own may take.
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  // The deadline of an operation that is submitted now.
  [[nodiscard]] Deadline deadline_of(const Operation& operation) const {
    return operation.deadline.value_or(Deadline::in(timeout()));
  }

  // Fails the group with `reason`: wakes every waiter here; peers learn of it.
  virtual void abort(const Error& reason) = 0;

  // The error that the group has failed with; null while it is sound.
  [[nodiscard]] virtual std::exception_ptr failure() const = 0;

  // A rank of the group as the culprit of an error, with its process, as far as that is known.
  [[nodiscard]] virtual Blame culprit(int rank, std::string cause) const = 0;

  // The news that the backend has of the group's ranks without an operation; null if it has none.
  [[nodiscard]] virtual PeerNews* peer_news() noexcept { return nullptr; }

  // For whoever makes a group of some of its ranks by other means than split(), now and then while
  // they are waited for: throws where one of them is known not to come (PeerLost), or where this
  // group was aborted (Aborted).
  virtual void require_hope(const std::vector<int>& /*ranks*/) {}

  // For the same callers, once they have waited for a rank of this group in vain. `late` blames
  // that rank; what is returned blames the one that keeps it waiting, where the backend can tell.
  [[nodiscard]] virtual Timeout with_keeper(const Timeout& late) const { return late; }

  // Throws InvalidUsage where shutdown(), which refuses nothing, would break what the process does.
  virtual void check_shutdown() const {}

  // Lets the group go: later calls throw InvalidUsage; peers that still wait for this rank fail
  // with PeerLost. Operations under way fail with Aborted. Idempotent; never throws.
  virtual void shutdown() noexcept = 0;

  // Called after shutdown(): waits until no thread works for the group any more, until `deadline`
  // at most. For backends whose end has to wait for the peers, and does so on a thread of its own.
  virtual void wait_for_end(Deadline /*deadline*/) noexcept {}

  // What every rank of the group is in, a line each, from the journal; empty where the backend
  // keeps none.
  [[nodiscard]] virtual std::vector<std::string> whereabouts() const = 0;
};

// whereabouts() in sentences, for the end of a message.
[[nodiscard]] std::string places_of_ranks(const Communicator& communicator);

}  // namespace pydist
