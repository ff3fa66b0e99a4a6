#include "c10d/sparse_all_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/error.h"
#include "c10d/device_streams.h"
#include "c10d/elastic_threads.h"
#include "c10d/tensors.h"

namespace pydist {
namespace {

// What ranks must agree on, but for the first word.
constexpr std::size_t kShapeHash = 4;
constexpr std::size_t kWords = 5;
using Facts = std::array<std::int64_t, kWords>;

Facts facts_of(const at::Tensor& tensor) {
  Digest shape;
  for (const std::int64_t extent : tensor.sizes()) {
    shape.add(static_cast<std::uint64_t>(extent));
  }
  return {tensor._nnz(), tensor.sparse_dim(), tensor.dense_dim(),
          static_cast<std::int64_t>(tensor.scalar_type()),
          static_cast<std::int64_t>(shape.value())};
}

std::vector<Facts> exchange_facts(Communicator& communicator, Facts own,
                                  std::optional<Deadline> deadline) {
  std::vector<Facts> facts(static_cast<std::size_t>(communicator.size()));
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.deadline = deadline;
  operation.label = "sparse shapes";
  operation.inputs = {{.data = own.data(), .count = kWords, .dtype = DType::kInt64, .device = {}}};
  operation.outputs = {
      {.data = facts.data(), .count = kWords * facts.size(), .dtype = DType::kInt64, .device = {}}};
  communicator.run(std::move(operation));
  return facts;
}

void require_agreement(const std::vector<Facts>& facts) {
  constexpr std::array kNames{"values", "sparse dimensions", "dense dimensions", "dtypes"};
  for (std::size_t rank = 1; rank < facts.size(); ++rank) {
    for (std::size_t word = 1; word < kWords; ++word) {
      if (facts[rank][word] == facts[0][word]) {
        continue;
      }
      if (word == kShapeHash) {
        throw Mismatch(join("all_reduce of sparse tensors: rank 0 and rank ", rank,
                            " have tensors of different shapes."),
                       Blame{.ranks = {0, static_cast<int>(rank)}});
      }
      throw Mismatch(
          join("all_reduce of sparse tensors: ranks disagree about ", kNames[word], ": rank 0 has ",
               facts[0][word], ", rank ", rank, " has ", facts[rank][word], "."),
          Blame{.ranks = {0, static_cast<int>(rank)}});
    }
  }
}

struct Parts {
  at::Tensor own_indices;
  at::Tensor own_values;
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;
};

// target = the sum of all parts, coalesced.
void add_up(const Parts& parts, const at::Tensor& target, ReduceOp op, int size) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor sum =
      at::_sparse_coo_tensor_with_dims_and_tensors(
          target.sparse_dim(), target.dense_dim(), target.sizes(), at::cat(parts.indices, 1),
          at::cat(parts.values, 0), target.options().device(at::kCPU))
          .coalesce();
  if (op == ReduceOp::kMean) {
    sum.div_(size);
  }
  target.copy_(sum);
}

Operation gather_parts(const Communicator& communicator, const at::Tensor& own,
                       const std::vector<at::Tensor>& parts, std::optional<Deadline> deadline,
                       const char* label) {
  DenseTensors dense(communicator, DenseTensors::Lifetime::kBorrowed);
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.deadline = deadline;
  operation.label = label;
  operation.inputs = {dense.input(own)};
  operation.outputs = dense.outputs(parts);
  dense.attach_to(operation);
  return operation;
}

}  // namespace

WorkPtr sparse_all_reduce(Communicator& communicator, const at::Tensor& tensor, ReduceOp op,
                          std::optional<Deadline> deadline) {
  if (tensor.layout() != at::kSparse || !(tensor.is_cpu() || tensor.is_cuda())) {
    throw InvalidUsage(
        "all_reduce takes dense tensors and sparse COO tensors, on the CPU or a CUDA device.");
  }
  if (op != ReduceOp::kSum && op != ReduceOp::kMean) {
    throw InvalidUsage(join("all_reduce of sparse tensors has sum and mean, not '", to_string(op),
                            "': use dense tensors."));
  }
  require_arithmetic(tensor, OpKind::kAllReduce, op);
  if (const DType dtype = *dtype_of(tensor.scalar_type()); !is_supported(op, dtype)) {
    throw InvalidUsage(
        join("all_reduce: op '", to_string(op), "' is not defined for ", to_string(dtype), "."));
  }
  // A sum of gradients has no history.
  const at::AutoDispatchBelowADInplaceOrView guard;
  // The few values of a sparse tensor travel through host memory, whatever the backend moves.
  const at::Tensor own = tensor.cpu().coalesce();
  const std::vector<Facts> facts = exchange_facts(communicator, facts_of(own), deadline);
  require_agreement(facts);

  auto parts = std::make_shared<Parts>();
  parts->own_indices = own._indices().contiguous();
  parts->own_values = own._values().contiguous();
  for (const Facts& fact : facts) {
    parts->indices.push_back(at::empty({own.sparse_dim(), fact[0]}, parts->own_indices.options()));
    std::vector<std::int64_t> shape = parts->own_values.sizes().vec();
    shape[0] = fact[0];
    parts->values.push_back(at::empty(shape, parts->own_values.options()));
  }
  std::vector<Operation> operations;
  operations.push_back(
      gather_parts(communicator, parts->own_indices, parts->indices, deadline, "sparse indices"));
  operations.push_back(
      gather_parts(communicator, parts->own_values, parts->values, deadline, "sparse values"));
  auto work = std::make_shared<Work>();
  const auto stream =
      tensor.is_cuda() ? std::optional(current_stream(device_of(tensor.device()))) : std::nullopt;
  const WorkPtr gathered = combine(communicator.submit_grouped(std::move(operations)));
  // Elsewhere: adding up takes longer than the thread that moves operations along should be kept.
  gathered->on_completion([work, parts, target = tensor, stream, op,
                           size = communicator.size()](const Work::Outcome& outcome) {
    if (outcome.error) {
      work->finish(outcome.error);
      return;
    }
    ElasticThreads::shared().post_or_run([work, parts, target, stream, op, size] {
      try {
        // The caller's: the memory of the result belongs to the stream that it was made on.
        const c10::OptionalStreamGuard on_stream(stream);
        std::optional<OutsideCaptures> outside;
        if (stream) {
          outside.emplace();
        }
        add_up(*parts, target, op, size);
        work->finish();
      } catch (...) {
        work->finish(std::current_exception());
      }
    });
  });
  return work;
}

}  // namespace pydist
