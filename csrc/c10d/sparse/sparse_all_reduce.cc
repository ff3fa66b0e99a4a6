#include "c10d/sparse/sparse_all_reduce.h"

#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/accumulate.h>

#include <array>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/error.h"
#include "c10d/device_streams.h"
#include "c10d/elastic_threads.h"
#include "c10d/sparse/row_sum.h"
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

// What travels in one operation: of each rank, what it has of several tensors, one behind another.
struct Packed {
  at::Tensor own;                   // of one dimension
  at::Tensor whole;                 // of all ranks, in rank order
  std::vector<at::Tensor> of_rank;  // parts of it
};

Packed pack(const std::vector<at::Tensor>& own, const std::vector<std::int64_t>& counts) {
  Packed packed{.own = at::cat(own), .whole = {}, .of_rank = {}};
  packed.whole = at::empty({std::accumulate(counts.begin(), counts.end(), std::int64_t{0})},
                           packed.own.options());
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    packed.of_rank.push_back(packed.whole.narrow(0, begin, count));
    begin += count;
  }
  return packed;
}

Operation gather(const Communicator& communicator, const Packed& packed,
                 std::optional<Deadline> deadline, const char* label) {
  DenseTensors dense(communicator, DenseTensors::Lifetime::kBorrowed);
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.deadline = deadline;
  operation.label = label;
  operation.inputs = {dense.input(packed.own)};
  operation.outputs = dense.outputs(packed.of_rank);
  dense.attach_to(operation);
  return operation;
}

// One tensor's part in a joint sum.
struct Member {
  at::Tensor target;
  std::optional<c10::Stream> stream;  // the caller's, of a target on a device
  at::Tensor own;                     // what this rank adds, coalesced, on the host
  std::vector<Facts> facts;           // of all ranks
};

}  // namespace

// Tensors whose values have one type, which travel together and are added up by one thread.
struct JointSum {
  ReduceOp op = ReduceOp::kSum;
  std::vector<Member> members;
  Packed indices;
  Packed values;
};

namespace {

// Elements of a tensor's row.
std::int64_t width_of(const Member& member) {
  return c10::multiply_integers(member.own._values().sizes().slice(1));
}

// The next elements of what a rank has sent, as a tensor; `begin` moves on.
at::Tensor take(const at::Tensor& of_rank, std::int64_t& begin, at::IntArrayRef shape) {
  const std::int64_t count = c10::multiply_integers(shape);
  at::Tensor part = of_rank.narrow(0, begin, count).view(shape);
  begin += count;
  return part;
}

// target = the sum of what was gathered, coalesced.
void add_up(const JointSum& joint) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  // How much of a rank's part has been taken.
  struct Taken {
    std::int64_t indices = 0;
    std::int64_t values = 0;
  };
  const std::size_t size = joint.indices.of_rank.size();
  std::vector<Taken> taken(size);
  for (const Member& member : joint.members) {
    const at::Tensor& target = member.target;
    std::vector<std::int64_t> shape = member.own._values().sizes().vec();
    std::vector<SparseRows> of_ranks;
    for (std::size_t rank = 0; rank < size; ++rank) {
      shape[0] = member.facts[rank][0];
      of_ranks.push_back(
          {take(joint.indices.of_rank[rank], taken[rank].indices, {shape[0], target.sparse_dim()}),
           take(joint.values.of_rank[rank], taken[rank].values, shape)});
    }
    const SparseRows sum = sum_of_rows(of_ranks);
    if (joint.op == ReduceOp::kMean) {
      sum.values.div_(static_cast<std::int64_t>(size));
    }
    // The caller's: the memory of the result belongs to the stream that it was made on.
    const c10::OptionalStreamGuard on_stream(member.stream);
    std::optional<OutsideCaptures> outside;
    if (member.stream) {
      outside.emplace();
    }
    target.copy_(at::_sparse_coo_tensor_with_dims_and_tensors(
        target.sparse_dim(), target.dense_dim(), target.sizes(), sum.indices.t().contiguous(),
        sum.values, sum.values.options().layout(at::kSparse), /*is_coalesced=*/true));
  }
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

// Whether rows are sorted by their indices, (dimensions, rows), and none comes twice.
bool is_ascending(const at::Tensor& indices) {
  const auto row = indices.accessor<std::int64_t, 2>();
  for (std::int64_t next = 1; next < row.size(1); ++next) {
    std::int64_t dimension = 0;
    while (dimension < row.size(0) && row[dimension][next] == row[dimension][next - 1]) {
      ++dimension;
    }
    if (dimension == row.size(0) || row[dimension][next] < row[dimension][next - 1]) {
      return false;
    }
  }
  return true;
}

// What a rank adds to the sum: few values, which go through host memory whatever the backend moves.
at::Tensor contribution(const at::Tensor& tensor, double factor) {
  at::Tensor own = tensor.cpu().to(at::toOpMathType(tensor.scalar_type())).coalesce();
  if (!is_ascending(own._indices())) {
    // The program has said that it is coalesced, and it is not.
    own = own.clone()._coalesced_(false).coalesce();
  }
  return factor == 1.0 ? own : own.mul(factor);
}

// Puts what the ranks have of these tensors behind each other.
void lay_out(JointSum& joint) {
  const std::size_t size = joint.members[0].facts.size();
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;
  std::vector<std::int64_t> index_counts(size, 0);
  std::vector<std::int64_t> value_counts(size, 0);
  for (const Member& member : joint.members) {
    indices.push_back(member.own._indices().t().reshape({-1}));
    values.push_back(member.own._values().reshape({-1}));
    for (std::size_t rank = 0; rank < size; ++rank) {
      const std::int64_t rows = member.facts[rank][0];
      index_counts[rank] += rows * member.own.sparse_dim();
      value_counts[rank] += rows * width_of(member);
    }
  }
  joint.indices = pack(indices, index_counts);
  joint.values = pack(values, value_counts);
}

// Bytes of all ranks' rows from which on further tensors are another joint sum, which another
// thread can add up.
constexpr std::int64_t kBytesOfAThread = std::int64_t{1} << 20;

// Of all ranks.
std::int64_t bytes_of(const Member& member) {
  std::int64_t rows = 0;
  for (const Facts& facts : member.facts) {
    rows += facts[0];
  }
  return rows * width_of(member) * static_cast<std::int64_t>(member.own._values().itemsize());
}

// The work of adding up, which begins when all parts have been `gathered`.
WorkPtr when_gathered(Work& gathered, std::shared_ptr<JointSum> joint) {
  auto work = std::make_shared<Work>();
  // Elsewhere: adding up takes longer than the thread that moves operations along should be kept.
  gathered.on_completion([work, joint = std::move(joint)](const Work::Outcome& outcome) {
    if (outcome.error) {
      work->finish(outcome.error);
      return;
    }
    ElasticThreads::shared().post_or_run([work, joint] {
      try {
        add_up(*joint);
        work->finish();
      } catch (...) {
        work->finish(std::current_exception());
      }
    });
  });
  return work;
}

// Tensors of one type are summed together, up to what another thread is worth.
std::vector<std::shared_ptr<JointSum>> joint_sums(std::vector<Member> members, ReduceOp op) {
  std::vector<std::shared_ptr<JointSum>> joints;
  struct Last {
    std::shared_ptr<JointSum> joint;
    std::int64_t bytes = 0;
  };
  std::map<at::ScalarType, Last> last;
  for (Member& member : members) {
    Last& its = last[member.own.scalar_type()];
    if (its.joint == nullptr || its.bytes >= kBytesOfAThread) {
      its = {std::make_shared<JointSum>()};
      its.joint->op = op;
      joints.push_back(its.joint);
    }
    its.bytes += bytes_of(member);
    its.joint->members.push_back(std::move(member));
  }
  return joints;
}

}  // namespace

SparseSums::SparseSums(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                       ReduceOp op, double factor, std::optional<Deadline> deadline)
    : communicator_(communicator) {
  for (const at::Tensor& tensor : tensors) {
    require_reducible(tensor, op);
  }
  if (tensors.empty()) {
    return;
  }
  // A sum of gradients has no history.
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<Member> members;
  std::vector<Facts> own_facts;
  for (const at::Tensor& tensor : tensors) {
    Member& member = members.emplace_back();
    member.target = tensor;
    member.own = contribution(tensor, factor);
    if (tensor.is_cuda()) {
      member.stream = current_stream(device_of(tensor.device()));
    }
    own_facts.push_back(facts_of(tensor, member.own._nnz()));
  }
  std::vector<std::vector<Facts>> facts =
      exchange_facts(communicator, std::move(own_facts), deadline);
  for (std::size_t i = 0; i < members.size(); ++i) {
    require_agreement(facts[i]);
    members[i].facts = std::move(facts[i]);
  }
  joints_ = joint_sums(std::move(members), op);
  std::vector<Operation> operations;
  for (const auto& joint : joints_) {
    lay_out(*joint);
    operations.push_back(gather(communicator, joint->indices, deadline, "sparse indices"));
    operations.push_back(gather(communicator, joint->values, deadline, "sparse values"));
  }
  gathered_ = communicator.submit_grouped(std::move(operations));
  try {
    for (std::size_t i = 0; i < gathered_.size(); ++i) {
      // The memory must outlive the operation, whatever becomes of this object.
      gathered_[i]->on_completion([joint = joints_[i / 2]](const Work::Outcome&) {});
    }
  } catch (...) {
    std::rethrow_exception(communicator.fail_started(gathered_));
  }
}

WorkPtr SparseSums::elsewhere(std::size_t first) {
  std::vector<WorkPtr> sums;
  for (std::size_t i = first; i < joints_.size(); ++i) {
    const WorkPtr both = combine({gathered_[2 * i], gathered_[2 * i + 1]});
    sums.push_back(when_gathered(*both, joints_[i]));
  }
  return combine(std::move(sums));
}

void SparseSums::finish() {
  if (joints_.empty()) {
    return;
  }
  const WorkPtr others = elsewhere(1);
  add_up(*joints_[0]);
  others->wait();
}

WorkPtr SparseSums::finish_elsewhere() {
  try {
    return elsewhere(0);
  } catch (...) {
    std::rethrow_exception(communicator_.fail_started(gathered_));
  }
}

}  // namespace pydist
