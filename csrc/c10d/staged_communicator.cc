#include "c10d/staged_communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "c10d/device_streams.h"
#include "c10d/elastic_threads.h"
#include "c10d/errors.h"
#include "c10d/memory_tensor.h"
#include "c10d/serial_queue.h"
#include "c10d/tensors.h"
#include "communicator/open_communicators.h"
#include "communicator/staging_plan.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// See Note [Three slots].
constexpr std::size_t kSlots = 3;
// How long an operation that failed waits for copies that it has started. They wait for nothing but
// what was on the device before them.
constexpr std::chrono::seconds kCopyPatience{1};

bool is_on_device(const Operation& operation) {
  const Buffer* const buffer = operation.first_buffer();
  return buffer != nullptr && buffer->device.type != DeviceType::kCpu;
}

class DeviceMemory final : public Memory {
 public:
  DeviceMemory(std::size_t bytes, Device device)
      : bytes_(bytes), data_(allocate_on_device(bytes, device)) {}

  [[nodiscard]] void* data() const noexcept override { return data_.get(); }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }
  [[nodiscard]] bool is_symmetric() const noexcept override { return false; }

 private:
  const std::size_t bytes_;
  const c10::DataPtr data_;
};

// Host memory that parts pass through.
struct Slots {
  MemoryPtr symmetric;                  // where the backend has such memory
  std::unique_ptr<PinnedRange> pinned;  // of it
  c10::DataPtr ordinary;                // otherwise
  std::byte* data = nullptr;
};

// What threads of the group's finish.
class StagedWork final : public Work {
 public:
  explicit StagedWork(std::weak_ptr<const Communicator> host) : host_(std::move(host)) {}

  [[nodiscard]] std::string diagnosis() override {
    const auto host = host_.lock();
    return host == nullptr ? "" : places_of_ranks(*host);
  }

 private:
  const std::weak_ptr<const Communicator> host_;
};

// An operation on device memory, from submit() on.
struct Staged {
  Operation operation;
  Device device;
  EventPtr ready;  // what was on the device before it
  Deadline deadline;
  WorkPtr work;
};

using StagedPtr = std::shared_ptr<Staged>;

// What operations under way share with the communicator, which they may outlive.
class Staging {
 public:
  Staging(CommunicatorPtr host, std::size_t slot_bytes)
      : host_(std::move(host)),
        slot_bytes_(std::max(slot_bytes, StagingPlan::least_slot_bytes(host_->size()))),
        has_symmetric_memory_(host_->capabilities().symmetric_memory) {}

  [[nodiscard]] Communicator& host() const noexcept { return *host_; }

  // How many of the jobs that were posted are not over yet.
  std::atomic<int> collectives_under_way{0};
  std::atomic<int> sends_under_way{0};

  // Runs a collective, on the thread of the collectives.
  void run(Staged& staged) {
    bool has_begun = false;
    Slots own;
    try {
      require_sound();
      run_parts(staged, own, has_begun);
      staged.work->finish();
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!are_copies_over(staged.device)) {
        keep_for_ever(std::exchange(slots_, Slots()));
        keep_for_ever(std::move(own));
      }
      give_up(staged, error, has_begun);
    }
  }

  // Copies a message to the host, and sends it.
  void send(const StagedPtr& staged) {
    std::shared_ptr<c10::DataPtr> memory;
    try {
      memory = message_memory(*staged);
      auto* const slot = static_cast<std::byte*>(memory->get());
      StagedPart part = part_of_message(staged->operation, slot);
      const Streams streams = streams_of(staged->device);
      wait_on_device(streams.to_host, *staged->ready);
      copy_to_host(part, slot, staged->device, streams);
      await(*staged, *record_event(streams.to_host));
      const WorkPtr sent = host_->submit(std::move(part.operation));
      sent->on_completion([staged, memory](const Work::Outcome& outcome) {
        staged->work->finish(outcome.error, outcome.source_rank);
      });
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!are_copies_over(staged->device)) {
        keep_for_ever(std::move(memory));
      }
      give_up(*staged, error, /*has_begun=*/false);
    }
  }

  // Copies what has come to the device.
  void deliver(Staged& staged, const std::shared_ptr<c10::DataPtr>& memory, int source_rank) {
    try {
      const Streams streams = streams_of(staged.device);
      auto* const slot = static_cast<std::byte*>(memory->get());
      wait_on_device(streams.to_device, *staged.ready);
      copy_to_device(part_of_message(staged.operation, slot), slot, staged.device, streams);
      await(staged, *record_event(streams.to_device));
      staged.work->finish(nullptr, source_rank);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!are_copies_over(staged.device)) {
        keep_for_ever(std::shared_ptr<c10::DataPtr>(memory));
      }
      give_up(staged, error, /*has_begun=*/true);
    }
  }

  [[nodiscard]] StagedPart part_of_message(const Operation& operation, void* memory) const {
    const StagingPlan plan(operation, host_->rank(), host_->size(), slot_bytes_);
    return plan.part(0, static_cast<std::byte*>(memory));
  }

  [[nodiscard]] std::shared_ptr<c10::DataPtr> message_memory(const Staged& staged) const {
    const StagingPlan plan(staged.operation, host_->rank(), host_->size(), slot_bytes_);
    return std::make_shared<c10::DataPtr>(allocate_pinned(plan.slot_bytes()));
  }

 private:
  // One for each direction, so that the two engines of a device that copy work at a time.
  struct Streams {
    c10::Stream to_host;
    c10::Stream to_device;
  };

  Streams streams_of(Device device) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(device.index);
    if (found != streams_.end()) {
      return found->second;
    }
    const Streams streams{high_priority_stream(device), high_priority_stream(device)};
    return streams_.emplace(device.index, streams).first->second;
  }

  void run_parts(const Staged& staged, Slots& own, bool& has_begun) {
    const Operation& operation = staged.operation;
    const StagingPlan plan(operation, host_->rank(), host_->size(), slot_bytes_);
    if (plan.is_whole()) {
      own.ordinary = allocate_pinned(plan.slot_bytes());
      own.data = static_cast<std::byte*>(own.ordinary.get());
    }
    Slots& slots = plan.is_whole() ? own : shared_slots(staged.device);
    const Streams streams = streams_of(staged.device);
    // Also of an operation without inputs: no part goes on before the stream has come so far, so
    // copies to the device need not wait for it.
    wait_on_device(streams.to_host, *staged.ready);
    const auto slot_of = [&](std::size_t part) {
      return slots.data + part % kSlots * (plan.is_whole() ? 0 : plan.slot_bytes());
    };
    std::array<EventPtr, kSlots> arrived;
    std::array<EventPtr, kSlots> left;
    const auto begin = [&](std::size_t index) {
      const std::size_t slot = index % kSlots;
      if (left[slot]) {
        wait_on_device(streams.to_host, *left[slot]);
      }
      copy_to_host(plan.part(index, slot_of(index)), slot_of(index), staged.device, streams);
      arrived[slot] = record_event(streams.to_host);
    };
    begin(0);
    for (std::size_t index = 0; index < plan.parts(); ++index) {
      const std::size_t slot = index % kSlots;
      if (index + 1 < plan.parts()) {
        begin(index + 1);
      }
      await(staged, *arrived[slot]);
      StagedPart part = plan.part(index, slot_of(index));
      part.operation.deadline = staged.deadline;
      host_->run(std::move(part.operation));
      copy_to_device(part, slot_of(index), staged.device, streams);
      left[slot] = record_event(streams.to_device);
      has_begun = true;
    }
    await(staged, *left[(plan.parts() - 1) % kSlots]);
  }

  static void copy_to_host(const StagedPart& part, std::byte* slot, Device device,
                           const Streams& streams) {
    for (const StagedCopy& copy : part.before) {
      copy_async(slot + copy.offset, Device{}, copy.device, device, copy.bytes, streams.to_host);
    }
  }

  static void copy_to_device(const StagedPart& part, const std::byte* slot, Device device,
                             const Streams& streams) {
    for (const StagedCopy& copy : part.after) {
      copy_async(copy.device, device, slot + copy.offset, Device{}, copy.bytes, streams.to_device);
    }
  }

  // See Note [Three slots].
  Slots& shared_slots(Device device) {
    if (slots_.data != nullptr) {
      return slots_;
    }
    const std::size_t bytes = kSlots * slot_bytes_;
    if (has_symmetric_memory_) {
      try {
        slots_.symmetric = host_->allocate(bytes, Device{});
        slots_.pinned = std::make_unique<PinnedRange>(slots_.symmetric->data(), bytes, device);
        slots_.data = static_cast<std::byte*>(slots_.symmetric->data());
        return slots_;
      } catch (const TransportError& error) {
        // On all ranks alike.
        log_line(LogLevel::kInfo,
                 join("staging of device tensors takes ordinary memory: ", error.what()));
      }
    }
    slots_.ordinary = allocate_pinned(bytes);
    slots_.data = static_cast<std::byte*>(slots_.ordinary.get());
    return slots_;
  }

  void require_sound() const {
    if (const std::exception_ptr failure = host_->failure()) {
      std::rethrow_exception(failure);
    }
  }

  void await(const Staged& staged, const c10::Event& event) const {
    if (wait_on_host(event, staged.deadline, [this] { return host_->failure() != nullptr; })) {
      return;
    }
    require_sound();
    throw Timeout(join(to_string(staged.operation.kind), " on rank ", host_->rank(), " of ",
                       host_->size(), " of group '", host_->name(),
                       "': the device did not come to it in time: what its stream was given "
                       "before has not finished."));
  }

  // Memory that a late copy to the host still writes, so that nobody else may have it. The caller's
  // memory is only read by such a copy.
  template <typename Held>
  static void keep_for_ever(Held held) {
    new Held(std::move(held));
  }

  // Waits for copies that are under way, because they read and write memory that the caller gets
  // back.
  bool are_copies_over(Device device) noexcept {
    try {
      const Deadline deadline = Deadline::in(kCopyPatience);
      const Streams streams = streams_of(device);
      return wait_on_host(*record_event(streams.to_host), deadline) &&
             wait_on_host(*record_event(streams.to_device), deadline);
    } catch (const std::exception&) {
      return true;  // the device itself has failed
    }
  }

  // Fails the group, because the peers wait for an operation that does not come. Not needed where
  // the host's communicator has told them, or refuses the operation on all ranks alike.
  void give_up(const Staged& staged, const std::exception_ptr& error, bool has_begun) {
    const auto [kind, what] = describe_briefly(error);
    if (host_->failure() == nullptr && (kind != ErrorKind::kInvalidUsage || has_begun)) {
      host_->abort(Error(kind, join(to_string(staged.operation.kind), " on rank ", host_->rank(),
                                    " could not be staged: ", what)));
    }
    staged.work->finish(error);
  }

  const CommunicatorPtr host_;
  const std::size_t slot_bytes_;
  const bool has_symmetric_memory_;
  std::mutex mutex_;
  std::map<int, Streams> streams_;  // guarded by mutex_
  // By the thread of the collectives only.
  Slots slots_;
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(CommunicatorPtr host, std::size_t slot_bytes)
      : host_(host), staging_(std::make_shared<Staging>(std::move(host), slot_bytes)) {}
  ~StagedCommunicator() override { shutdown(); }

  [[nodiscard]] int rank() const noexcept override { return host_->rank(); }
  [[nodiscard]] int size() const noexcept override { return host_->size(); }
  [[nodiscard]] const std::string& name() const noexcept override { return host_->name(); }

  [[nodiscard]] Capabilities capabilities() const override {
    Capabilities can = host_->capabilities();
    can.devices.push_back({DeviceType::kCuda, 0});
    can.needs_host = true;
    return can;
  }
  [[nodiscard]] bool takes(DeviceType /*type*/) const override { return true; }

  [[nodiscard]] std::string why_unsupported(OpKind kind, ReduceOp op, DType dtype) const override {
    return host_->why_unsupported(kind, op, dtype);
  }

  [[nodiscard]] WorkPtr submit(Operation operation) override {
    if (is_on_device(operation)) {
      return stage(std::move(operation));
    }
    if (!must_queue(operation)) {
      return host_->submit(std::move(operation));
    }
    return queue_behind(std::move(operation));
  }

  [[nodiscard]] WorkPtr submit_grouped(std::vector<Operation> operations) override {
    const bool is_plain =
        std::none_of(operations.begin(), operations.end(), [this](const Operation& operation) {
          return is_on_device(operation) || must_queue(operation);
        });
    if (is_plain) {
      return host_->submit_grouped(std::move(operations));
    }
    for (const Operation& operation : operations) {
      validate(operation, rank(), size());
    }
    std::vector<WorkPtr> works;
    works.reserve(operations.size());
    for (Operation& operation : operations) {
      works.push_back(submit(std::move(operation)));
    }
    return combine(std::move(works));
  }

  using Communicator::run;
  int run(Operation&& operation) override {
    return is_on_device(operation) || must_queue(operation)
               ? Communicator::run(std::move(operation))
               : host_->run(std::move(operation));
  }

  [[nodiscard]] MemoryPtr allocate(std::size_t bytes, Device device) override {
    if (device.type != DeviceType::kCpu) {
      require_open();
      return std::make_shared<DeviceMemory>(bytes, device);
    }
    if (staging_->collectives_under_way != 0) {
      // Collective as well, so it keeps the order.
      const auto work = std::make_shared<Work>();
      post(collectives_, &Staging::collectives_under_way, [work] { work->finish(); });
      work->wait();
    }
    return host_->allocate(bytes, device);
  }

  [[nodiscard]] std::vector<std::byte*> symmetric_addresses(const void* data,
                                                            std::size_t bytes) const override {
    return host_->symmetric_addresses(data, bytes);
  }

  [[nodiscard]] CommunicatorPtr split(const std::vector<int>& ranks) override {
    return with_staging(host_->split(ranks));
  }

  [[nodiscard]] milliseconds timeout() const override { return host_->timeout(); }
  void set_timeout(milliseconds timeout) override { host_->set_timeout(timeout); }
  void abort(const Error& reason) override { host_->abort(reason); }
  [[nodiscard]] std::exception_ptr failure() const override { return host_->failure(); }
  [[nodiscard]] std::optional<Absence> absence() const override { return host_->absence(); }
  void watch_peers() override { host_->watch_peers(); }
  void set_farewell(std::uint64_t done) noexcept override { host_->set_farewell(done); }
  [[nodiscard]] std::vector<std::string> whereabouts() const override {
    return host_->whereabouts();
  }

  void shutdown() noexcept override {
    if (is_shut_down_.exchange(true)) {
      return;
    }
    // Fails what is under way, so that the threads come to an end.
    host_->shutdown();
    if (!in_forked_child()) {
      collectives_.stop();
      messages_.stop();
    }
  }

 private:
  // See Note [Order].
  [[nodiscard]] bool must_queue(const Operation& operation) const noexcept {
    return is_point_to_point(operation.kind)
               ? operation.kind == OpKind::kSend && staging_->sends_under_way.load() != 0
               : staging_->collectives_under_way.load() != 0;
  }

  void require_open() const {
    require_not_forked();
    if (is_shut_down_) {
      throw InvalidUsage(join("The group '", name(), "' has been shut down."));
    }
    if (const std::exception_ptr failure = host_->failure()) {
      std::rethrow_exception(failure);
    }
  }

  // `count` counts the job until it is over.
  void post(SerialQueue& queue, std::atomic<int> Staging::* count, std::function<void()> job) {
    auto counted = std::make_shared<Count>(staging_, count);
    const bool is_posted =
        queue.post([counted = std::move(counted), job = std::move(job)]() mutable {
          const OutsideCaptures outside;
          job();
          job = nullptr;  // with the memory that it holds
        });
    if (!is_posted) {
      throw Aborted(join("The group '", name(), "' is being shut down."));
    }
  }

  // An operation on host memory.
  WorkPtr queue_behind(Operation operation) {
    require_open();
    validate(operation, rank(), size());
    if (!operation.deadline) {
      operation.deadline = Deadline::in(timeout());
    }
    auto work = std::make_shared<StagedWork>(host_);
    const bool is_message = is_point_to_point(operation.kind);
    auto job = [staging = staging_, operation = std::move(operation), work] {
      try {
        staging->host().submit(operation)->on_completion([work](const Work::Outcome& outcome) {
          work->finish(outcome.error, outcome.source_rank);
        });
      } catch (...) {
        work->finish(std::current_exception());
      }
    };
    if (is_message) {
      post(messages_, &Staging::sends_under_way, std::move(job));
    } else {
      post(collectives_, &Staging::collectives_under_way, std::move(job));
    }
    return work;
  }

  WorkPtr stage(Operation operation) {
    require_open();
    validate(operation, rank(), size());
    const Device device = operation.first_buffer()->device;
    if (size() == 1 && !is_point_to_point(operation.kind)) {
      combine_alone(operation, device);
      return completed_work();
    }
    const c10::Stream stream = current_stream(device);
    if (is_capturing(stream)) {
      throw InvalidUsage(join(
          to_string(operation.kind), " on backend '", host_->capabilities().backend,
          "' cannot be part of a CUDA graph, since the host takes part in it: leave it outside "
          "the capture, or use a backend of the device's own."));
    }
    const Deadline deadline = operation.deadline ? *operation.deadline : Deadline::in(timeout());
    operation.deadline = deadline;
    auto staged =
        std::make_shared<Staged>(Staged{std::move(operation), device, record_event(stream),
                                        deadline, std::make_shared<StagedWork>(host_)});
    switch (staged->operation.kind) {
      case OpKind::kSend:
        post(messages_, &Staging::sends_under_way,
             [staging = staging_, staged] { staging->send(staged); });
        break;
      case OpKind::kRecv:
        start_receive(staged);
        break;
      default:
        post(collectives_, &Staging::collectives_under_way,
             [staging = staging_, staged] { staging->run(*staged); });
        break;
    }
    return staged->work;
  }

  // What a collective of one rank comes to, on the caller's stream: its input, multiplied or
  // rounded where the operation says so.
  static void combine_alone(const Operation& operation, Device device) {
    const c10::Stream stream = current_stream(device);
    for (std::size_t i = 0; i < operation.inputs.size() && i < operation.outputs.size(); ++i) {
      const Buffer& input = operation.inputs[i];
      const Buffer& output = operation.outputs[i];
      if (input.data != output.data) {
        copy_async(output.data, device, input.data, device, input.bytes(), stream);
      }
      const bool has_wire = operation.wire_dtype && *operation.wire_dtype != input.dtype;
      const bool has_factor = has_op(operation.kind) && operation.op == ReduceOp::kPremulSum;
      if ((has_wire || has_factor) && input.count != 0) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        at::Tensor values =
            borrow_bytes(output.data, output.bytes(), device).view(scalar_type_of(output.dtype));
        const auto round = [&] { values.copy_(values.to(scalar_type_of(*operation.wire_dtype))); };
        // As among several ranks: the contribution is rounded, and so is the result.
        if (has_wire) {
          round();
        }
        if (has_factor) {
          values.mul_(operation.factor);
          if (has_wire) {
            round();
          }
        }
      }
    }
  }

  void start_receive(const StagedPtr& staged) {
    const std::shared_ptr<c10::DataPtr> memory = staging_->message_memory(*staged);
    StagedPart part = staging_->part_of_message(staged->operation, memory->get());
    const WorkPtr received = host_->submit(std::move(part.operation));
    // The thread that brings the message does not wait for the device.
    received->on_completion([staging = staging_, staged, memory](const Work::Outcome& outcome) {
      if (outcome.error != nullptr) {
        staged->work->finish(outcome.error);
        return;
      }
      ElasticThreads::shared().post([staging, staged, memory, source = outcome.source_rank] {
        const OutsideCaptures outside;
        staging->deliver(*staged, memory, source);
      });
    });
  }

  // One more, for as long as it lives.
  class Count {
   public:
    Count(std::shared_ptr<Staging> staging, std::atomic<int> Staging::* count)
        : staging_(std::move(staging)), count_((*staging_).*count) {
      ++count_;
    }
    Count(const Count&) = delete;
    Count& operator=(const Count&) = delete;
    ~Count() { --count_; }

   private:
    const std::shared_ptr<Staging> staging_;
    std::atomic<int>& count_;
  };

  const CommunicatorPtr host_;
  const std::shared_ptr<Staging> staging_;
  std::atomic<bool> is_shut_down_{false};
  SerialQueue collectives_{"pydist-staging"};
  SerialQueue messages_{"pydist-staging"};
};

}  // namespace

CommunicatorPtr with_staging(CommunicatorPtr host) {
  if (!has_cuda()) {
    return host;
  }
  auto staged =
      std::make_shared<StagedCommunicator>(std::move(host), Environment::read().staging_bytes);
  note_open(staged);
  return staged;
}

}  // namespace pydist
