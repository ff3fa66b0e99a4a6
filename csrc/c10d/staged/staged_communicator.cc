#include "c10d/staged/staged_communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/fork.h"
#include "c10d/device_streams.h"
#include "c10d/elastic_threads.h"
#include "c10d/errors.h"
#include "c10d/memory_tensor.h"
#include "c10d/serial_queue.h"
#include "c10d/staged/staging.h"
#include "c10d/tensors.h"
#include "communicator/open_communicators.h"
#include "communicator/staging_parts.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

bool is_on_device(const Operation& operation) {
  const Buffer* const buffer = operation.first_buffer();
  return buffer != nullptr && buffer->device.type != DeviceType::kCpu;
}

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

  void check(const Operation& operation) const override {
    if (!is_on_device(operation)) {
      host_->check(operation);
      return;
    }
    require_open();
    validate(operation, rank(), size());
    if (stays_on_device(operation)) {
      return;
    }
    if (is_capturing(current_stream(operation.first_buffer()->device))) {
      throw InvalidUsage(join(
          to_string(operation.kind), " on backend '", host_->capabilities().backend,
          "' cannot be part of a CUDA graph, since the host takes part in it: leave it outside "
          "the capture, or use a backend of the device's own."));
    }
    Operation on_host = operation;
    for (Buffers* buffers : {&on_host.inputs, &on_host.outputs}) {
      for (Buffer& buffer : *buffers) {
        buffer.device = Device{};
      }
    }
    host_->check(on_host);
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

  using Communicator::run;
  int run(Operation&& operation) override {
    return is_on_device(operation) || must_queue(operation)
               ? Communicator::run(std::move(operation))
               : host_->run(std::move(operation));
  }

  [[nodiscard]] MemoryPtr allocate(std::size_t bytes, Device device) override {
    if (device.type != DeviceType::kCpu) {
      require_open();
      return std::make_shared<AllocatedMemory>(allocate_on_device(bytes, device), bytes);
    }
    wait_for_queue();
    return host_->allocate(bytes, device);
  }

  [[nodiscard]] std::shared_ptr<AllocationHeap> share_allocations(
      std::optional<std::size_t> max_bytes, const std::string& refusal) override {
    wait_for_queue();
    return host_->share_allocations(max_bytes, refusal);
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
  [[nodiscard]] PeerNews* peer_news() noexcept override { return host_->peer_news(); }
  [[nodiscard]] Blame culprit(int rank, std::string cause) const override {
    return host_->culprit(rank, std::move(cause));
  }
  void require_hope(const std::vector<int>& ranks) override { host_->require_hope(ranks); }
  [[nodiscard]] Timeout with_keeper(const Timeout& late) const override {
    return host_->with_keeper(late);
  }
  [[nodiscard]] std::vector<std::string> whereabouts() const override {
    return host_->whereabouts();
  }

  void shutdown() noexcept override {
    if (is_shut_down_.exchange(true)) {
      return;
    }
    // Fails the operations under way, so that the threads come to an end.
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

  // For what is collective as well, and keeps the order.
  void wait_for_queue() {
    if (staging_->collectives_under_way != 0) {
      const auto work = std::make_shared<Work>();
      post(collectives_, &Staging::collectives_under_way, [work] { work->finish(); });
      work->wait();
    }
  }

  [[nodiscard]] bool stays_on_device(const Operation& operation) const noexcept {
    return size() == 1 && !is_point_to_point(operation.kind);
  }

  void require_open() const {
    require_not_forked();
    if (is_shut_down_) {
      throw InvalidUsage(join("The group '", name(), "' has been shut down."));
    }
    rethrow_if_any(host_->failure());
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
    check(operation);
    operation.deadline = deadline_of(operation);
    auto work = std::make_shared<StagedWork>(host_);
    const bool is_message = is_point_to_point(operation.kind);
    auto job = [staging = staging_, operation = std::move(operation), work] {
      try {
        const WorkPtr on_host = staging->host().submit(operation);
        on_host->on_completion([work](const Work::Outcome& outcome) {
          work->finish(outcome.error, outcome.source_rank);
        });
        on_host->go_on_unattended();
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
    check(operation);
    const Device device = operation.first_buffer()->device;
    if (stays_on_device(operation)) {
      combine_alone(operation, device);
      return completed_work();
    }
    const c10::Stream stream = current_stream(device);
    const Deadline deadline = deadline_of(operation);
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
        staged->finish(outcome.error);
        return;
      }
      ElasticThreads::shared().post_or_run([staging, staged, memory, source = outcome.source_rank] {
        const OutsideCaptures outside;
        staging->deliver(*staged, memory, source);
      });
    });
    received->go_on_unattended();
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
