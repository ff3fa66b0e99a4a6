#include "c10d/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "c10d/device_streams.h"
#include "c10d/elastic_threads.h"
#include "c10d/errors.h"
#include "cuda/stream.h"

namespace pydist {
namespace {

// What runs once, behind an operation: on a stream that waits for it, or on the host.
class Epilogue {
 public:
  Epilogue(std::function<void()> run, int device) : run_(std::move(run)), device_(device) {}

  // Where it has run on a stream, waits for that.
  void run_on_host() {
    const std::lock_guard lock(mutex_);
    if (!has_run_) {
      run_();
      has_run_ = true;
    }
    if (!behind_) {
      return;
    }
    const cuda::DeviceGuard guard(device_);
    while (!behind_->is_done()) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  // `run` puts it on `stream`, which is current; other streams wait for it there.
  void run_on_stream(const std::function<void()>& run, void* stream) {
    const std::lock_guard lock(mutex_);
    const cuda::DeviceGuard guard(device_);
    if (has_run_) {
      if (behind_) {
        behind_->hold_back(stream);
      }
      return;
    }
    run();
    has_run_ = true;
    behind_.emplace();
    behind_->record(stream);
  }

 private:
  const std::function<void()> run_;
  const int device_;
  std::mutex mutex_;
  bool has_run_ = false;                    // guarded by mutex_
  std::optional<cuda::OwnedEvent> behind_;  // guarded by mutex_
};

class EpilogueWork : public Work {
 public:
  // `on_stream` is what the epilogue is where a stream of the calling thread waits for the
  // operation.
  EpilogueWork(WorkPtr inner, std::shared_ptr<Epilogue> epilogue, std::function<void()> on_stream)
      : inner_(std::move(inner)),
        epilogue_(std::move(epilogue)),
        on_stream_(std::move(on_stream)) {}

  [[nodiscard]] bool wait_on_stream(void* stream) override {
    if (on_stream_ == nullptr || !inner_->wait_on_stream(stream)) {
      return false;
    }
    epilogue_->run_on_stream(on_stream_, stream);
    return true;
  }

  [[nodiscard]] std::string diagnosis() override { return inner_->diagnosis(); }

 protected:
  void block(Deadline deadline) override {
    inner_->wait_quietly(deadline);
    // The thread that finishes the inner work may still be in the epilogue.
    Work::block(deadline);
  }

 private:
  const WorkPtr inner_;
  const std::shared_ptr<Epilogue> epilogue_;
  const std::function<void()> on_stream_;
};

// What was captured with results that are finished behind it, on `finishing`.
class FinishedInCapture : public Work {
 public:
  // That device is current.
  FinishedInCapture(WorkPtr inner, void* finishing, int device)
      : inner_(std::move(inner)),
        device_(device),
        capture_(cuda::Driver::get().capture_of(finishing)) {
    finished_.record(finishing);
  }

  [[nodiscard]] bool wait_on_stream(void* stream) override {
    if (!inner_->wait_on_stream(stream)) {
      return false;
    }
    const cuda::DeviceGuard guard(device_);
    // Which it is since then, or its capture is over.
    if (capture_ && cuda::Driver::get().capture_of(stream) == capture_) {
      finished_.hold_back(stream);
    }
    return true;
  }

  [[nodiscard]] bool is_captured() const override { return true; }

 private:
  const WorkPtr inner_;
  const int device_;
  const std::optional<std::uint64_t> capture_;
  const cuda::OwnedEvent finished_;
};

// Those that a future has to know: callbacks get streams on them that wait for the results.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu() &&
        std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
      devices.push_back(tensor.device());
    }
  }
  return devices;
}

}  // namespace

WorkPtr with_epilogue(WorkPtr inner, std::function<void()> run, std::function<void()> on_stream,
                      int device) {
  const bool waits_for_device = on_stream != nullptr;
  auto epilogue = std::make_shared<Epilogue>(std::move(run), device);
  auto work = std::make_shared<EpilogueWork>(inner, epilogue, std::move(on_stream));
  const auto conclude = [work, epilogue](const Work::Outcome& outcome) {
    std::exception_ptr error = outcome.error;
    if (error == nullptr) {
      try {
        epilogue->run_on_host();
      } catch (...) {
        error = std::current_exception();
      }
    }
    work->finish(std::move(error), outcome.source_rank);
  };
  inner->on_completion([conclude, waits_for_device](const Work::Outcome& outcome) {
    // The thread that finishes operations is the one that notices when a device hangs.
    if (waits_for_device && outcome.error == nullptr) {
      ElasticThreads::shared().post_or_run([conclude, outcome] {
        const OutsideCaptures outside;
        conclude(outcome);
      });
    } else {
      conclude(outcome);
    }
  });
  return work;
}

WorkPtr with_tensors(WorkPtr inner, std::shared_ptr<DenseTensors> held) {
  // In a graph nothing happens later that would not happen at every replay: the caller's stream
  // joins the operation at once, and memory may go in its order.
  if (held->is_captured() && inner->wait_on_stream(held->stream())) {
    if (!held->has_unfinished()) {
      return inner;
    }
    held->finish_outputs();
    const cuda::DeviceGuard guard(held->device_index());
    auto finished =
        std::make_shared<FinishedInCapture>(inner, held->stream(), held->device_index());
    inner->on_completion([finished](const Work::Outcome& outcome) {
      finished->finish(outcome.error, outcome.source_rank);
    });
    return finished;
  }
  if (held->has_unfinished()) {
    if (!held->are_unfinished_on_device()) {
      return with_epilogue(std::move(inner), [held] { held->finish_outputs(); });
    }
    return with_epilogue(
        std::move(inner), [held] { held->finish_outputs_and_wait(); },
        [held] { held->finish_outputs(); }, held->device_index());
  }
  if (held->is_on_device()) {
    // Not on the thread that finishes operations: a device's allocator may wait for the device.
    inner->on_completion([held = std::move(held)](const Work::Outcome&) mutable {
      ElasticThreads::shared().post_or_run([held = std::move(held)] {});
    });
  } else {
    inner->on_completion([held](const Work::Outcome&) {});
  }
  return inner;
}

void DeferredWork::attach(WorkPtr inner) {
  {
    const std::lock_guard lock(mutex_);
    inner_ = inner;
  }
  // Holds this work, because the caller may drop it before the operation has finished.
  inner->on_completion([self = shared_from_this()](const Outcome& outcome) {
    self->finish(outcome.error, outcome.source_rank);
  });
}

bool DeferredWork::wait_on_stream(void* stream) {
  const std::lock_guard lock(mutex_);
  return inner_ != nullptr && inner_->wait_on_stream(stream);
}

bool DeferredWork::is_captured() const {
  const std::lock_guard lock(mutex_);
  return inner_ != nullptr && inner_->is_captured();
}

std::string DeferredWork::diagnosis() {
  const std::lock_guard lock(mutex_);
  return inner_ == nullptr ? "" : inner_->diagnosis();
}

void DeferredWork::block(Deadline deadline) {
  WorkPtr inner;
  {
    const std::lock_guard lock(mutex_);
    inner = inner_;
  }
  if (inner == nullptr) {
    throw InvalidUsage(
        "The operation starts when its coalescing block ends, so it cannot be waited for inside.");
  }
  inner->wait_quietly(deadline);
  Work::block(deadline);
}

void wait_for_results(Work& work, const std::vector<at::Tensor>& results) {
  const std::vector<c10::Device> devices = devices_of(results);
  const bool do_streams_wait =
      !devices.empty() && std::all_of(devices.begin(), devices.end(), [&](c10::Device device) {
        return work.wait_on_stream(current_stream(device_of(device)).native_handle());
      });
  if (!do_streams_wait) {
    work.wait();
  }
}

bool is_over(Work& work) {
  if (!in_forked_child()) {  // where nobody finishes it
    work.wait_quietly(Deadline::in(std::chrono::nanoseconds::zero()));
  }
  return work.is_completed();
}

TorchWork::TorchWork(int rank, c10d::OpType type, WorkPtr work, std::vector<at::Tensor> results,
                     std::uint64_t sequence, const char* profiling_title)
    : c10d::Work(rank, type, profiling_title),
      work_(std::move(work)),
      results_(std::move(results)),
      sequence_(sequence) {
  if (recordFunctionEndCallback_) {
    work_->on_completion([end = std::exchange(recordFunctionEndCallback_, nullptr)](
                             const pydist::Work::Outcome&) { end(); });
  }
}

bool TorchWork::isCompleted() { return is_over(*work_); }

bool TorchWork::isSuccess() const { return work_->is_completed() && work_->exception() == nullptr; }

std::exception_ptr TorchWork::exception() const { return for_torch(work_->exception()); }

int TorchWork::sourceRank() const { return work_->source_rank(); }

std::vector<at::Tensor> TorchWork::result() { return results_; }

void TorchWork::synchronize() { wait(kNoTimeout); }

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  guarded_for_torch([&] {
    if (timeout > kNoTimeout) {
      work_->wait(Deadline::in(timeout));
    } else {
      wait_for_results(*work_, results_);
    }
  });
  return true;
}

// Note [Futures complete elsewhere]
// Callbacks of a future are the user's: Python code that takes the GIL, and hooks that start
// another collective and wait for it (torch's PowerSGD does). On the thread that moves operations
// along, a callback would block the operation that it waits for, so each future completes on a
// thread of its own.
c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (future_) {
    return future_;
  }
  // As with torch's gloo: an all_gather takes a list of outputs for each input, and returns that.
  const bool is_nested = retrieveOpType() == c10d::OpType::ALLGATHER;
  c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  if (is_nested) {
    type = c10::ListType::create(std::move(type));
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(std::move(type), devices_of(results_));
  const auto complete = [is_nested](const c10::intrusive_ptr<c10::ivalue::Future>& future,
                                    const std::vector<at::Tensor>& results,
                                    const std::exception_ptr& error) {
    if (error == nullptr) {
      future->markCompleted(is_nested ? c10::IValue(std::vector<std::vector<at::Tensor>>{results})
                                      : c10::IValue(results));
    } else {
      future->setError(for_torch(error));
    }
  };
  // Where streams can wait, so can those of the callbacks: the future is complete as soon as the
  // operation is on its way. What is captured stays on the caller's stream, which has joined the
  // operation: a graph can't wait for what happens outside of it.
  const std::vector<c10::Device> devices = devices_of(results_);
  if (devices.size() == 1) {
    const Device device = device_of(devices[0]);
    const c10::Stream current = current_stream(device);
    const c10::Stream stream = work_->is_captured() ? current : high_priority_stream(device);
    const c10::StreamGuard guard(stream);
    try {
      if (work_->wait_on_stream(stream.native_handle())) {
        complete(future_, results_, nullptr);
        return future_;
      }
    } catch (...) {
      complete(future_, results_, std::current_exception());
      return future_;
    }
  }
  if (work_->is_completed()) {
    complete(future_, results_, work_->exception());
    return future_;
  }
  // Boxed, so that this thread gives its references away instead of releasing a copy.
  struct Parcel {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::vector<at::Tensor> results;
  };
  auto parcel = std::make_shared<Parcel>(Parcel{future_, results_});
  const auto device = devices.empty() ? std::nullopt : std::optional(devices[0]);
  work_->on_completion(
      [complete, parcel = std::move(parcel), device](const pydist::Work::Outcome& outcome) mutable {
        ElasticThreads::shared().post_or_run(
            [complete, parcel = std::move(parcel), device, error = outcome.error]() mutable {
              // The callbacks' device, too.
              const c10::OptionalDeviceGuard guard(device);
              complete(parcel->future, parcel->results, error);
              parcel = nullptr;  // with the future's events
            });
      });
  work_->go_on_unattended();
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFutureResult() {
  const std::lock_guard lock(future_mutex_);
  if (future_result_) {
    return future_result_;
  }
  future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  work_->on_completion([future = future_result_](const pydist::Work::Outcome& outcome) {
    auto result = c10d::WorkResult::SUCCESS;
    if (outcome.error) {
      result = describe(outcome.error).kind == ErrorKind::kTimeout ? c10d::WorkResult::TIMEOUT
                                                                   : c10d::WorkResult::COMM_ERROR;
    }
    ElasticThreads::shared().post_or_run([future, result] {
      future->markCompleted(c10::IValue(static_cast<std::int64_t>(result)));
    });
  });
  return future_result_;
}

std::uint64_t TorchWork::getSequencenumber() const { return sequence_; }

}  // namespace pydist
