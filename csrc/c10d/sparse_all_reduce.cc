#include "c10d/sparse_all_reduce.h"

#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <exception>
#include <memory>
#include <optional>
#include <string>
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
constexpr std::size_t kDType = 3;
constexpr std::size_t kShapeHash = 4;
constexpr std::size_t kWords = 5;
using Facts = std::array<std::int64_t, kWords>;

Facts facts_of(const at::Tensor& tensor, std::int64_t values) {
  Digest shape;
  for (const std::int64_t extent : tensor.sizes()) {
    shape.add(static_cast<std::uint64_t>(extent));
  }
  return {values, tensor.sparse_dim(), tensor.dense_dim(),
          static_cast<std::int64_t>(tensor.scalar_type()),
          static_cast<std::int64_t>(shape.value())};
}

// Of all ranks, for each tensor.
std::vector<std::vector<Facts>> exchange_facts(Communicator& communicator, std::vector<Facts> own,
                                               std::optional<Deadline> deadline) {
  std::vector<std::vector<Facts>> facts(own.size());
  std::vector<Facts> gathered(own.size() * static_cast<std::size_t>(communicator.size()));
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.deadline = deadline;
  operation.label = "sparse shapes";
  operation.inputs = {
      {.data = own.data(), .count = kWords * own.size(), .dtype = DType::kInt64, .device = {}}};
  operation.outputs = {{.data = gathered.data(),
                        .count = kWords * gathered.size(),
                        .dtype = DType::kInt64,
                        .device = {}}};
  communicator.run(std::move(operation));
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    facts[i % own.size()].push_back(gathered[i]);
  }
  return facts;
}

std::string text_of(std::size_t word, std::int64_t value) {
  return word == kDType ? c10::toString(static_cast<at::ScalarType>(value)) : std::to_string(value);
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
      throw Mismatch(join("all_reduce of sparse tensors: ranks disagree about ", kNames[word],
                          ": rank 0 has ", text_of(word, facts[0][word]), ", rank ", rank, " has ",
                          text_of(word, facts[rank][word]), "."),
                     Blame{.ranks = {0, static_cast<int>(rank)}});
    }
  }
}

// One kind of what a sparse tensor holds, a row a value.
struct Gathered {
  at::Tensor own;
  at::Tensor whole;                 // of all ranks, in rank order
  std::vector<at::Tensor> of_rank;  // parts of it
};

Operation gather(const Communicator& communicator, const Gathered& gathered,
                 std::optional<Deadline> deadline, const char* label) {
  DenseTensors dense(communicator, DenseTensors::Lifetime::kBorrowed);
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.deadline = deadline;
  operation.label = label;
  operation.inputs = {dense.input(gathered.own)};
  operation.outputs = dense.outputs(gathered.of_rank);
  dense.attach_to(operation);
  return operation;
}

// What other threads need after the call.
struct Reduction {
  at::Tensor target;
  ReduceOp op = ReduceOp::kSum;
  int size = 1;
  std::optional<c10::Stream> stream;  // the caller's, of a target on a device
  Gathered indices;
  Gathered values;
};

// target = the sum of what was gathered, coalesced.
void add_up(const Reduction& reduction) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor& target = reduction.target;
  at::Tensor sum =
      at::_sparse_coo_tensor_with_dims_and_tensors(
          target.sparse_dim(), target.dense_dim(), target.sizes(), reduction.indices.whole.t(),
          reduction.values.whole, reduction.values.own.options().layout(at::kSparse))
          .coalesce();
  if (reduction.op == ReduceOp::kMean) {
    sum.div_(reduction.size);
  }
  target.copy_(sum);
}

void require_reducible(const at::Tensor& tensor, ReduceOp op) {
  if (tensor.layout() != at::kSparse || !(tensor.is_cpu() || tensor.is_cuda())) {
    throw InvalidUsage(
        "all_reduce takes dense tensors and sparse COO tensors, on the CPU or a CUDA device.");
  }
  if (op != ReduceOp::kSum && op != ReduceOp::kMean && op != ReduceOp::kPremulSum) {
    throw InvalidUsage(join("all_reduce of sparse tensors has sum, mean and premul_sum, not '",
                            to_string(op), "': use dense tensors."));
  }
  require_arithmetic(tensor, OpKind::kAllReduce, op);
  if (const DType dtype = *dtype_of(tensor.scalar_type()); !is_supported(op, dtype)) {
    throw InvalidUsage(
        join("all_reduce: op '", to_string(op), "' is not defined for ", to_string(dtype), "."));
  }
}

// What a rank adds to the sum: few values, which go through host memory whatever the backend moves.
at::Tensor contribution(const at::Tensor& tensor, double factor) {
  const at::Tensor own = tensor.cpu().to(at::toOpMathType(tensor.scalar_type())).coalesce();
  return factor == 1.0 ? own : own.mul(factor);
}

Gathered room_for(const at::Tensor& own, const std::vector<Facts>& facts) {
  Gathered gathered{.own = own.contiguous(), .whole = {}, .of_rank = {}};
  std::vector<std::int64_t> shape = own.sizes().vec();
  shape[0] = 0;
  for (const Facts& fact : facts) {
    shape[0] += fact[0];
  }
  gathered.whole = at::empty(shape, own.options());
  std::int64_t begin = 0;
  for (const Facts& fact : facts) {
    gathered.of_rank.push_back(gathered.whole.narrow(0, begin, fact[0]));
    begin += fact[0];
  }
  return gathered;
}

// The work of adding up, which begins when all parts have been `gathered`.
WorkPtr when_gathered(Work& gathered, std::shared_ptr<Reduction> reduction) {
  auto work = std::make_shared<Work>();
  // Elsewhere: adding up takes longer than the thread that moves operations along should be kept.
  gathered.on_completion([work, reduction = std::move(reduction)](const Work::Outcome& outcome) {
    if (outcome.error) {
      work->finish(outcome.error);
      return;
    }
    ElasticThreads::shared().post_or_run([work, reduction] {
      try {
        // The caller's: the memory of the result belongs to the stream that it was made on.
        const c10::OptionalStreamGuard on_stream(reduction->stream);
        std::optional<OutsideCaptures> outside;
        if (reduction->stream) {
          outside.emplace();
        }
        add_up(*reduction);
        work->finish();
      } catch (...) {
        work->finish(std::current_exception());
      }
    });
  });
  return work;
}

}  // namespace

std::vector<WorkPtr> sparse_all_reduce(Communicator& communicator,
                                       const std::vector<at::Tensor>& tensors, ReduceOp op,
                                       double factor, std::optional<Deadline> deadline) {
  if (tensors.empty()) {
    return {};
  }
  for (const at::Tensor& tensor : tensors) {
    require_reducible(tensor, op);
  }
  // A sum of gradients has no history.
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<at::Tensor> own;
  std::vector<Facts> own_facts;
  for (const at::Tensor& tensor : tensors) {
    own.push_back(contribution(tensor, factor));
    own_facts.push_back(facts_of(tensor, own.back()._nnz()));
  }
  const std::vector<std::vector<Facts>> facts =
      exchange_facts(communicator, std::move(own_facts), deadline);

  std::vector<std::shared_ptr<Reduction>> reductions;
  std::vector<Operation> operations;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    require_agreement(facts[i]);
    auto& reduction = *reductions.emplace_back(std::make_shared<Reduction>());
    reduction.target = tensors[i];
    reduction.op = op;
    reduction.size = communicator.size();
    if (tensors[i].is_cuda()) {
      reduction.stream = current_stream(device_of(tensors[i].device()));
    }
    reduction.indices = room_for(own[i]._indices().t(), facts[i]);
    reduction.values = room_for(own[i]._values(), facts[i]);
    operations.push_back(gather(communicator, reduction.indices, deadline, "sparse indices"));
    operations.push_back(gather(communicator, reduction.values, deadline, "sparse values"));
  }
  const std::vector<WorkPtr> gathered = communicator.submit_grouped(std::move(operations));
  try {
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const WorkPtr both = combine({gathered[2 * i], gathered[2 * i + 1]});
      works.push_back(when_gathered(*both, reductions[i]));
    }
    return works;
  } catch (...) {
    std::rethrow_exception(communicator.fail_started(gathered));
  }
}

}  // namespace pydist
