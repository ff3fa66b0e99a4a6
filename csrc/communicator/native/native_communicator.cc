#include "communicator/native/native_communicator.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "collectives/between_hosts/between_hosts.h"
#include "collectives/between_hosts/by_hosts.h"
#include "collectives/ring.h"
#include "collectives/shared_memory/shared_memory.h"
#include "collectives/shared_memory/tuning.h"
#include "communicator/native/allocation_sharing.h"
#include "communicator/native/collective_queue.h"
#include "communicator/native/group_health.h"
#include "communicator/native/group_meeting.h"
#include "communicator/native/heap_allocation.h"
#include "communicator/native/message_queue.h"
#include "communicator/native/message_reads.h"
#include "communicator/open_communicators.h"
#include "communicator/operation_call.h"
#include "communicator/peer_news.h"
#include "communicator/peers/endpoint.h"
#include "communicator/splits.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

class HeapMemory final : public Memory {
 public:
  HeapMemory(std::shared_ptr<SymmetricHeap> heap, const HeapAllocation& allocation,
             std::size_t bytes)
      : heap_(std::move(heap)),
        placement_(allocation.placement),
        data_(allocation.data),
        bytes_(bytes) {}
  ~HeapMemory() override { heap_->release(placement_); }

  [[nodiscard]] void* data() const noexcept override { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }
  [[nodiscard]] bool is_symmetric() const noexcept override { return true; }

 private:
  const std::shared_ptr<SymmetricHeap> heap_;
  const SymmetricHeap::Placement placement_;
  std::byte* const data_;
  const std::size_t bytes_;
};

// The group does not keep what its meeting alone needs; check_hope refers to objects of the caller.
NativeOptions after_meeting(NativeOptions options) {
  options.check_hope = nullptr;
  options.processes.clear();
  return options;
}

class NativeCommunicator final : public Communicator,
                                 public PeerNews,
                                 public std::enable_shared_from_this<NativeCommunicator> {
 public:
  NativeCommunicator(StorePtr store, int rank, int size, NativeOptions options,
                     NativeMembership membership)
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        options_(after_meeting(std::move(options))),
        endpoint_(std::move(membership.endpoint)),
        endpoint_use_(std::move(membership.endpoint_use)),
        secret_(std::move(membership.secret)),
        timeout_ms_(options_.environment.timeout.count()),
        remote_(membership.remote),
        ranks_(remote_ ? remote_->placement() : Placement(size)),
        heap_(std::make_shared<SymmetricHeap>(
            ranks_.index_on_host(rank),
            static_cast<int>(ranks_.ranks_on(ranks_.host_of(rank)).size()),
            std::move(membership.heap_file), std::move(membership.memory_limits))),
        health_(std::make_shared<GroupHealth>(options_.name, rank, endpoint_,
                                              membership.group_segment, membership.peers,
                                              options_.long_wait, remote_)) {
    std::vector<Doorbell*> doorbells;
    for (const PeerPtr& peer : membership.peers) {
      doorbells.push_back(peer->doorbell);
    }
    engine_ = std::make_shared<Engine>(
        rank, size, membership.group_segment, doorbells, heap_, membership.peers, remote_,
        options_.environment.one_shot_bytes,
        make_tuning(membership.group_segment.chunk_bytes(), !membership.processes.empty()),
        membership.processes);
    const bool pins_ring = options_.environment.algorithm == AlgorithmChoice::kRing;
    collectives_ = std::make_shared<CollectiveQueue>(
        endpoint_->progress(), health_, engine_->group,
        [engine = engine_, pins_ring, rounds = membership.rounds](auto& operation, bool is_posted) {
          const Call call = resolve(operation, engine->group.rank(), engine->group.size());
          if (pins_ring && ring_supports(operation.kind)) {
            return run_ring(engine->group, call, engine->to_next(), engine->from_previous(),
                            engine->ring_slot_bytes());
          }
          return engine->remote ? run_between_hosts(engine->group, call, *engine->remote,
                                                    engine->remote->placement(), rounds)
                                : run_shared_memory(engine->group, call, is_posted);
        },
        [rank, size](const Operation& operation) { return resolve(operation, rank, size); },
        [heap = heap_] { heap->keep_others_out(); },
        /*runs_at_once=*/!pins_ring && remote_ == nullptr);
    messages_ = std::make_shared<MessageQueue>(
        endpoint_->progress(), health_,
        Messages(rank, size, std::move(membership.message_segment), doorbells, remote_.get(),
                 message_reads({engine_, &engine_->group}),
                 MessageWays(options_.rhythm(), &TuningTable::of_process())));
  }

  ~NativeCommunicator() override { shutdown(); }

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] const std::string& name() const noexcept override { return options_.name; }

  [[nodiscard]] Capabilities capabilities() const override {
    const bool pins_ring = options_.environment.algorithm == AlgorithmChoice::kRing;
    Capabilities can;
    can.backend = "native";
    can.devices = {Device{}};
    can.spans_hosts = remote_ != nullptr;
    can.symmetric_memory = true;
    can.any_source = true;
    can.ragged = true;
    can.wire_dtypes.assign(kWireDTypes.begin(), kWireDTypes.end());
    can.equal_on_all_ranks = true;
    can.equal_from_run_to_run = true;
    const bool goes_by_hosts = remote_ && has_hosts_of_several_ranks(remote_->placement());
    can.equal_for_all_chunkings = pins_ring ? size_ <= 2 : !goes_by_hosts;
    can.numerics = join(
        can.equal_for_all_chunkings ? "Elements are combined in rank order 0 to p-1"
        : pins_ring ? "Elements are combined in ring order, which depends on where they lie in "
                      "the buffer"
                    : "Elements are combined in rank order 0 to p-1; those of a large "
                      "reduction first on each host and then in the order of hosts, and each "
                      "host's sum is rounded",
        "; float16 and bfloat16 accumulate in float32 and are rounded once; a mean divides "
        "the sum once.");
    return can;
  }

  [[nodiscard]] bool takes(DeviceType type) const override { return type == DeviceType::kCpu; }

  [[nodiscard]] std::string why_unsupported(OpKind kind, ReduceOp op, DType dtype) const override {
    return !has_op(kind) || is_supported(op, dtype)
               ? std::string()
               : join("op '", to_string(op), "' is not defined for ", to_string(dtype));
  }

  void check(const Operation& operation) const override {
    if (operation.kind == OpKind::kAllocate) {
      throw InvalidUsage("Symmetric memory comes from allocate(), not from an operation.");
    }
    check_any(operation);
  }

  [[nodiscard]] WorkPtr submit(Operation operation) override {
    check(operation);
    const Deadline deadline = deadline_of(operation);
    return is_point_to_point(operation.kind) ? messages_->submit(std::move(operation), deadline)
                                             : collectives_->submit(std::move(operation), deadline);
  }

  using Communicator::run;
  int run(Operation&& operation) override {
    check(operation);
    if (const OpKind kind = operation.kind; is_point_to_point(kind)) {
      if (messages_->try_at_once(operation, /*may_wait=*/true)) {
        return kind == OpKind::kRecv ? operation.peer : -1;
      }
      const Deadline deadline = deadline_of(operation);
      return wait_for(*messages_->submit_awaited(std::move(operation), deadline), kind);
    }
    collectives_->run(std::move(operation), timeout());
    return -1;
  }

  [[nodiscard]] MemoryPtr allocate(std::size_t bytes, Device device) override {
    if (device.type != DeviceType::kCpu) {
      throw InvalidUsage("The native backend allocates host memory only.");
    }
    HeapAllocation result;
    Operation operation;
    operation.kind = OpKind::kAllocate;
    check_any(operation);
    const Deadline deadline = deadline_of(operation);
    const CollectiveQueue::MakeTask make_task = [&](const Operation& /*operation*/,
                                                    bool /*is_posted*/) {
      return allocate_on_heap(engine_->group, *heap_, ranks_, bytes, result);
    };
    collectives_->run_with(make_task, std::move(operation), deadline);
    if (!result.error.empty()) {
      throw TransportError(result.error, health_->blame(result.failed_rank, result.error));
    }
    return std::make_shared<HeapMemory>(heap_, result, bytes);
  }

  [[nodiscard]] std::shared_ptr<AllocationHeap> share_allocations(
      std::optional<std::size_t> max_bytes, const std::string& refusal) override {
    require_not_forked();
    require_open("share_allocations");
    return size_ == 1
               ? nullptr
               : pydist::share_allocations({*this, *endpoint_, engine_->peers, ranks_, *secret_},
                                           max_bytes, refusal);
  }

  void trim() override {
    run(Operation());  // a barrier
    if (ranks_.index_on_host(rank_) == 0) {
      heap_->trim();
    }
  }

  [[nodiscard]] std::vector<std::byte*> symmetric_addresses(const void* data,
                                                            std::size_t bytes) const override {
    const HeapReference reference = remote_ ? 0 : heap_->find(data, bytes);
    std::vector<std::byte*> addresses;
    for (int rank = 0; reference != 0 && rank < size_; ++rank) {
      addresses.push_back(heap_->address(rank, reference));
    }
    return addresses;
  }

  [[nodiscard]] CommunicatorPtr split(const std::vector<int>& ranks) override {
    require_not_forked();
    require_open("split");
    require_not_aborted();
    NativeOptions options = options_;
    options.environment.timeout = timeout();
    options.check_hope = [this, &ranks] { require_hope(ranks); };
    options.secret = secret_;
    // Before the meeting it is the lowest member that is waited for.
    const CheckHope hope_of_first = [&] {
      health_->show_awaited(ranks[0]);
      try {
        options.check_hope();
      } catch (...) {
        health_->show_awaiting_nobody();
        throw;
      }
    };
    try {
      return splits_.next(
          ranks, rank_, size_, *store_, "pydist/" + name(), Deadline::in(timeout()), hope_of_first,
          [this](int rank) { return health_->known(rank); },
          [&](int rank, const std::string& split, const KnownProcesses& processes) {
            health_->show_awaiting_nobody();
            options.name = join(name(), "/", split);
            options.processes = processes;
            return create_native_communicator(store_, rank, static_cast<int>(ranks.size()), options,
                                              {endpoint_});
          },
          [&](const std::string& split) {
            return native_group_declined(*store_, join(name(), "/", split));
          },
          [&](const std::string& split, const ErrorDescription& why) {
            return decline_native_group(*store_, join(name(), "/", split), why);
          });
    } catch (const Timeout& late) {
      throw with_keeper(late);
    }
  }

  void require_hope(const std::vector<int>& ranks) override {
    require_not_aborted();
    for (const int rank : ranks) {
      if (rank == rank_) {
        continue;
      }
      if (std::optional<GroupHealth::Loss> loss = health_->why_vain(rank)) {
        throw PeerLost(
            join(loss->what, ". ", health_->who(rank_), " waited for it to make a group."),
            std::move(loss->blame));
      }
    }
  }

  [[nodiscard]] Timeout with_keeper(const Timeout& late) const override {
    const std::vector<int>& missing = late.blame().ranks;
    if (missing.size() != 1 || missing[0] == rank_) {
      return late;
    }
    const GroupHealth::Keeper keeper = health_->keeper_behind(missing[0]);
    if (keeper.rank == missing[0]) {
      return late;
    }
    return Timeout(join(late.what(), " Seen from rank ", rank_, ": ", keeper.way,
                        health_->who(keeper.rank), " ", keeper.cause, "."),
                   health_->blame(keeper.rank, keeper.cause));
  }

  [[nodiscard]] std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  void set_timeout(std::chrono::milliseconds timeout) override {
    if (timeout.count() <= 0) {
      throw InvalidUsage(join("A timeout must be more than 0 ms, not ", timeout.count(), " ms."));
    }
    timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
  }

  void abort(const Error& reason) override {
    require_not_forked();
    if (birth_.is_inherited()) {
      return;  // its shared memory is the parent's
    }
    health_->fail(reason.kind(), reason.what(), blame_of(reason, rank_));
    collectives_->drain();
    messages_->drain();
  }

  [[nodiscard]] std::exception_ptr failure() const override {
    return health_->has_failed() ? health_->failure() : nullptr;
  }

  [[nodiscard]] PeerNews* peer_news() noexcept override { return this; }
  [[nodiscard]] Blame culprit(int rank, std::string cause) const override {
    return health_->blame(rank, std::move(cause));
  }
  [[nodiscard]] std::optional<Absence> absence() const override { return health_->absence(); }
  [[nodiscard]] std::vector<int> not_begun(std::uint64_t fingerprint,
                                           std::uint64_t number) const override {
    return health_->not_begun(fingerprint, number);
  }
  void set_farewell(std::uint64_t done) noexcept override { health_->set_farewell(done); }

  void shutdown() noexcept override {
    if (is_closed_.exchange(true) || in_forked_child()) {
      return;
    }
    try {
      health_->leave();
      collectives_->drain();
      messages_->drain();
    } catch (const std::exception& error) {
      log_line(LogLevel::kError, join("shutdown of group '", name(), "': ", error.what()));
    }
    if (remote_ && remote_->is_needed()) {
      endpoint_->keep_serving(remote_);
    }
    at_work_.end();
    endpoint_use_.end();
  }

  [[nodiscard]] std::vector<std::string> whereabouts() const override {
    return health_->whereabouts();
  }

 private:
  // What the state machines refer to; lives as long as any of them.
  struct Engine {
    Engine(int rank, int size, const GroupSegment& segment, const std::vector<Doorbell*>& doorbells,
           std::shared_ptr<SymmetricHeap> the_heap, std::vector<PeerPtr> the_peers,
           std::shared_ptr<RemoteRanks> the_remote, std::optional<std::size_t> one_shot_bytes,
           std::unique_ptr<Tuning> the_tuning, std::vector<ProcessMemory> processes)
        : heap(std::move(the_heap)),
          peers(std::move(the_peers)),
          remote(std::move(the_remote)),
          tuning(std::move(the_tuning)),
          group(rank, size, segment, doorbells, *heap, remote.get(), one_shot_bytes, tuning.get(),
                windows_of(peers), std::move(processes)),
          to_next_on_host(ring_channel(segment, rank, wrap(rank + 1, size)), wrap(rank + 1, size),
                          *doorbells[static_cast<std::size_t>(wrap(rank + 1, size))]),
          from_previous_on_host(ring_channel(segment, wrap(rank - 1, size), rank),
                                wrap(rank - 1, size),
                                *doorbells[static_cast<std::size_t>(wrap(rank - 1, size))]) {}

    [[nodiscard]] SendChannel& to_next() {
      return remote ? remote->to(wrap(group.rank() + 1, group.size())) : to_next_on_host;
    }
    [[nodiscard]] ReceiveChannel& from_previous() {
      return remote ? remote->from(wrap(group.rank() - 1, group.size())) : from_previous_on_host;
    }

    [[nodiscard]] std::size_t ring_slot_bytes() const {
      return remote ? remote->slot_bytes() : group.chunk_bytes();
    }

    static std::vector<const HeapWindow*> windows_of(const std::vector<PeerPtr>& peers) {
      std::vector<const HeapWindow*> windows;
      for (const PeerPtr& peer : peers) {
        windows.push_back(&peer->window);
      }
      return windows;
    }
    static int wrap(int rank, int size) { return (rank + size) % size; }
    static ShmChannelMemory ring_channel(const GroupSegment& segment, int sender, int receiver) {
      return {segment.transit(sender, 0),
              segment.chunk_bytes(),
              kTransitSlots,
              &segment.control(sender).ring_sent,
              &segment.control(receiver).ring_released,
              segment.control(sender).ring_lengths.data()};
    }

    std::shared_ptr<SymmetricHeap> heap;
    std::vector<PeerPtr> peers;           // hold the doorbells
    std::shared_ptr<RemoteRanks> remote;  // null on one host
    std::unique_ptr<Tuning> tuning;       // null where nothing is tuned
    Group group;
    ShmSendChannel to_next_on_host;
    ShmReceiveChannel from_previous_on_host;
  };

  // Null where nothing is tuned: ranks on other hosts see no post of this one's in time.
  [[nodiscard]] std::unique_ptr<Tuning> make_tuning(std::size_t chunk_bytes,
                                                    bool reads_processes) const {
    if (size_ == 1 || remote_ || !options_.rhythm()) {
      return nullptr;
    }
    const Environment& environment = options_.environment;
    return std::make_unique<Tuning>(rank_, size_,
                                    TuningLimits{chunk_bytes, environment.pins_chunk,
                                                 environment.one_shot_bytes, reads_processes},
                                    options_.tuning, TuningTable::of_process());
  }

  // As check(), for allocate() too.
  void check_any(const Operation& operation) const {
    require_not_forked();
    require_open(to_string(operation.kind));
    if (health_->has_failed()) {
      std::rethrow_exception(health_->failure());
    }
    validate(operation, rank_, size_);
    const Buffer* const buffer = operation.first_buffer();
    if (buffer != nullptr && buffer->device.type != DeviceType::kCpu) {
      throw InvalidUsage(join(to_string(operation.kind),
                              ": the native backend takes CPU tensors only; move the tensor "
                              "to the CPU, or use a backend for its device."));
    }
  }

  [[nodiscard]] Deadline deadline_of(const Operation& operation) const {
    return operation.deadline ? *operation.deadline : Deadline::in(timeout());
  }

  // For what takes no part in the group's operations. What has failed otherwise may go on in groups
  // of its own.
  void require_not_aborted() const {
    if (const std::exception_ptr error = failure();
        error != nullptr && describe(error).kind == ErrorKind::kAborted) {
      std::rethrow_exception(error);
    }
  }

  // Throws where the group has been shut down.
  void require_open(std::string_view what) const {
    if (is_closed_.load(std::memory_order_relaxed)) {
      throw InvalidUsage(join(what, " on the group '", name(), "', which has been shut down."));
    }
  }

  const Birth birth_;
  GroupAtWork at_work_;
  const StorePtr store_;
  const int rank_;
  const int size_;
  const NativeOptions options_;
  const std::shared_ptr<Endpoint> endpoint_;
  EndpointUse endpoint_use_;                       // until shutdown()
  const std::shared_ptr<const JobSecret> secret_;  // of the groups that are split off
  std::atomic<std::int64_t> timeout_ms_;
  std::atomic<bool> is_closed_{false};
  const std::shared_ptr<RemoteRanks> remote_;  // null on one host
  const Placement ranks_;
  const std::shared_ptr<SymmetricHeap> heap_;  // of this host
  const std::shared_ptr<GroupHealth> health_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<CollectiveQueue> collectives_;
  std::shared_ptr<MessageQueue> messages_;
  Splits splits_;
};

}  // namespace

CommunicatorPtr create_native_communicator(StorePtr store, int rank, int size,
                                           const NativeOptions& options, Introduced introduced) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidUsage(
        join("rank ", rank, " of ", size,
             " is not possible: the size must be at least 1 and the rank below it."));
  }
  require_not_forked();
  NativeMembership membership = meet_group(*store, rank, size, options, std::move(introduced));
  auto communicator = std::make_shared<NativeCommunicator>(std::move(store), rank, size, options,
                                                           std::move(membership));
  note_open(communicator);
  return communicator;
}

}  // namespace pydist
