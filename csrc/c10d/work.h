// Handles of operations on their way to torch: what completes after results in dense copies are in
// place, what stands for an operation that has not started, and the c10d::Work over either.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "c10d/tensors.h"
#include "communicator/work.h"

namespace pydist {

// A work that finishes after `inner` has finished and `epilogue` has run. The epilogue runs only if
// `inner` succeeded; an exception of the epilogue becomes the work's error.
//
// `on_stream` does the same in the order of the calling thread's stream; where it is given, streams
// can wait for the work if they can for `inner`.
[[nodiscard]] WorkPtr with_epilogue(WorkPtr inner, std::function<void()> epilogue,
                                    std::function<void()> on_stream = nullptr, int device = 0);

// A work that finishes when `inner` has and the outputs among `tensors` are finished; it keeps
// their memory until then.
[[nodiscard]] WorkPtr with_tensors(WorkPtr inner, std::shared_ptr<DenseTensors> tensors);

// Waits for the results of an operation. Where they are on a device and the backend can, the
// streams that are current there wait, and the caller doesn't.
void wait_for_results(Work& work, const std::vector<at::Tensor>& results);

// Whether the operation has finished by now, also where only somebody who looks would notice.
[[nodiscard]] bool is_over(Work& work);

// Stands for an operation that starts later (inside a coalescing block).
class DeferredWork : public Work, public std::enable_shared_from_this<DeferredWork> {
 public:
  // Finishes as `inner` does. Called once.
  void attach(WorkPtr inner);

  [[nodiscard]] bool wait_on_stream(void* stream) override;
  [[nodiscard]] bool is_captured() const override;
  [[nodiscard]] std::string diagnosis() override;

 protected:
  void block(Deadline deadline) override;

 private:
  mutable std::mutex mutex_;
  WorkPtr inner_;  // guarded by mutex_
};

// What torch holds. Shares ownership of the work; thread safe.
class TorchWork : public c10d::Work {
 public:
  TorchWork(int rank, c10d::OpType type, WorkPtr work, std::vector<at::Tensor> results,
            std::uint64_t sequence, const char* profiling_title = nullptr);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::uint64_t getSequencenumber() const override;

 private:
  WorkPtr work_;
  std::vector<at::Tensor> results_;
  std::uint64_t sequence_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;         // guarded by future_mutex_
  c10::intrusive_ptr<c10::ivalue::Future> future_result_;  // guarded by future_mutex_
};

}  // namespace pydist
