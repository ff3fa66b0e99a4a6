#include "c10d/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "c10d/elastic_threads.h"
#include "c10d/errors.h"

namespace pydist {
namespace {

class EpilogueWork : public Work {
 public:
  explicit EpilogueWork(WorkPtr inner) : inner_(std::move(inner)) {}

 protected:
  void block(Deadline deadline) override {
    inner_->wait_quietly(deadline);
    // The thread that finishes the inner work may still be in the epilogue.
    Work::block(deadline);
  }

 private:
  const WorkPtr inner_;
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

WorkPtr with_epilogue(WorkPtr inner, std::function<void()> epilogue) {
  auto work = std::make_shared<EpilogueWork>(inner);
  inner->on_completion([work, epilogue = std::move(epilogue)](const Work::Outcome& outcome) {
    std::exception_ptr error = outcome.error;
    if (error == nullptr) {
      try {
        epilogue();
      } catch (...) {
        error = std::current_exception();
      }
    }
    work->finish(std::move(error), outcome.source_rank);
  });
  return work;
}

WorkPtr with_tensors(WorkPtr inner, DenseTensors tensors) {
  auto held = std::make_shared<DenseTensors>(std::move(tensors));
  if (held->has_copies()) {
    return with_epilogue(std::move(inner), [held] { held->copy_back_and_wait(); });
  }
  inner->on_completion([held](const Work::Outcome&) {});
  return inner;
}

void DeferredWork::attach(WorkPtr inner) {
  {
    const std::lock_guard lock(mutex_);
    inner_ = inner;
  }
  // Holds this work: whoever submitted may have dropped it before the operation has finished.
  inner->on_completion([self = shared_from_this()](const Outcome& outcome) {
    self->finish(outcome.error, outcome.source_rank);
  });
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

bool TorchWork::isCompleted() { return work_->is_completed(); }

bool TorchWork::isSuccess() const { return work_->is_completed() && work_->exception() == nullptr; }

std::exception_ptr TorchWork::exception() const { return for_torch(work_->exception()); }

int TorchWork::sourceRank() const { return work_->source_rank(); }

std::vector<at::Tensor> TorchWork::result() { return results_; }

void TorchWork::synchronize() { wait(kNoTimeout); }

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  guarded_for_torch(
      [&] { work_->wait(timeout > kNoTimeout ? Deadline::in(timeout) : Deadline::never()); });
  return true;
}

// Note [Futures complete elsewhere]
// Callbacks of a future are the user's: Python code that takes the GIL, and hooks that start
// another collective and wait for it (torch's PowerSGD does). On the thread that moves operations
// along they would stop what they wait for, so each future completes on a thread of its own.
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
  work_->on_completion([complete,
                        parcel = std::move(parcel)](const pydist::Work::Outcome& outcome) mutable {
    ElasticThreads::shared().post([complete, parcel = std::move(parcel), error = outcome.error] {
      complete(parcel->future, parcel->results, error);
    });
  });
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
    ElasticThreads::shared().post([future, result] {
      future->markCompleted(c10::IValue(static_cast<std::int64_t>(result)));
    });
  });
  return future_result_;
}

std::uint64_t TorchWork::getSequencenumber() const { return sequence_; }

}  // namespace pydist
