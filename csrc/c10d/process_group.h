// Our communicator as torch.distributed's backend "pydist".
//
// Translates each call of torch's into operations of the seam: tensors into dense buffers (copied
// where they are not), torch's reduce operators and timeouts into ours, our works into torch's.
// A call that torch does not want asynchronous runs on the calling thread.
//
// Shares ownership of the communicator. Thread safe as the communicator is; a coalescing block
// belongs to the thread that opened it. Errors leave as torch understands them (c10d/errors.h).

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "c10d/tensors.h"
#include "c10d/work.h"
#include "communicator/communicator.h"

namespace pydist {

// The group needs a class of its own: torch copies the options of a group that it splits, and
// cannot copy its own class of options.
struct ProcessGroupOptions : c10d::Backend::Options {
  using c10d::Backend::Options::Options;
};

class TorchProcessGroup : public c10d::Backend {
 public:
  using WorkRef = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  TorchProcessGroup(CommunicatorPtr communicator, std::chrono::milliseconds timeout);
  ~TorchProcessGroup() override;

  [[nodiscard]] const CommunicatorPtr& communicator() const noexcept { return communicator_; }

  const std::string getBackendName() const override { return "pydist"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  [[nodiscard]] const c10::intrusive_ptr<ProcessGroupOptions>& options() const noexcept {
    return options_;
  }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }

  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  // Blocks until all ranks have called: they first tell each other how many values they have.
  WorkRef allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkRef allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkRef _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkRef allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkRef gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkRef scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkRef reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkRef _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkRef alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkRef alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkRef send(Tensors& tensors, int peer, int tag) override;
  WorkRef recv(Tensors& tensors, int peer, int tag) override;
  WorkRef recvAnysource(Tensors& tensors, int tag) override;
  WorkRef barrier(const c10d::BarrierOptions& options) override;

  // A barrier that names on rank 0 those that did not come in time.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  void startCoalescing() override;
  WorkRef endCoalescing() override;

  void setSequenceNumberForGroup() override;
  std::uint64_t getSequenceNumberForGroup() override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  // Null on a rank that is not among `ranks`.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void abort() override;
  void shutdown() override;

 private:
  // A call of torch's, translated.
  struct Call {
    c10d::OpType type;
    std::chrono::milliseconds timeout;
    bool is_async;
    DenseTensors tensors;
    std::vector<Operation> operations;
    // What the future of the work yields.
    Tensors results;

    Call(const Communicator& communicator, c10d::OpType type, std::chrono::milliseconds timeout,
         bool is_async);
    Operation& add(OpKind kind, int peer = 0);
  };

  // A call that waits for endCoalescing().
  struct Deferred {
    std::vector<Operation> operations;
    std::shared_ptr<DenseTensors> tensors;
    Tensors results;
    std::shared_ptr<DeferredWork> work;
  };
  using Coalescing = std::vector<Deferred>;

  template <typename TorchOptions>
  [[nodiscard]] Call new_call(c10d::OpType type, const TorchOptions& options) {
    return {*communicator_, type, options.timeout, options.asyncOp || coalescing()};
  }
  WorkRef launch(Call call);
  WorkRef wrap(c10d::OpType type, WorkPtr work, Tensors results);
  Coalescing* coalescing();
  // Returns what the results are to be divided by behind the operation: see Note [Averages of
  // integers].
  [[nodiscard]] std::int64_t set_op(Operation& operation, const c10d::ReduceOp& op,
                                    const at::Tensor& tensor) const;

  const CommunicatorPtr communicator_;
  const c10::intrusive_ptr<ProcessGroupOptions> options_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<std::uint64_t> monitored_barriers_{0};
  // Nearly always none: then no call takes the lock.
  std::atomic<int> coalescing_count_{0};
  std::mutex coalescing_mutex_;
  std::unordered_map<std::thread::id, Coalescing> coalescing_;  // guarded by coalescing_mutex_
};

}  // namespace pydist
