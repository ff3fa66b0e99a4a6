#include "communicator/nccl/nccl_collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "collectives/call.h"
#include "collectives/float16_overflow.h"
#include "communicator/nccl/nccl_ring.h"
#include "communicator/operation_call.h"
#include "kernels/cpu/convert.h"

namespace pydist {
namespace {

using nccl::DataType;
using nccl::RedOp;

struct Reduction {
  DataType type;
  RedOp op;
  std::size_t width = 1;  // of NCCL's elements, in one of ours
};

// In the order of DType; NCCL has no integers of 16 bits, and moves float8 as bytes.
constexpr std::array<std::optional<DataType>, kDTypeCount> kTypes = {
    DataType::kFloat64, DataType::kFloat32, DataType::kFloat16, DataType::kBfloat16,
    DataType::kInt8,    std::nullopt,       DataType::kInt32,   DataType::kInt64,
    DataType::kUint8,   std::nullopt,       DataType::kUint32,  DataType::kUint64,
    DataType::kUint8,   DataType::kFloat32, DataType::kFloat64, std::nullopt};

// What NCCL calls it; nothing where NCCL has no such thing, or gives other results than the other
// backends.
std::optional<Reduction> reduction_of(ReduceOp op, DType dtype) {
  const std::optional<DataType> type = kTypes.at(static_cast<std::size_t>(dtype));
  if (!type) {
    return std::nullopt;
  }
  const bool is_bool = dtype == DType::kBool;  // 0 or 1
  const auto is_one = [op](std::initializer_list<ReduceOp> ops) {
    return std::find(ops.begin(), ops.end(), op) != ops.end();
  };
  if (is_bool) {
    if (is_one({ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor})) {
      return Reduction{*type, RedOp::kMax};
    }
    if (is_one({ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kBand})) {
      return Reduction{*type, RedOp::kMin};
    }
    return std::nullopt;
  }
  if (is_one({ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kPremulSum})) {
    return Reduction{*type, RedOp::kSum, is_complex(dtype) ? std::size_t{2} : std::size_t{1}};
  }
  if (op == ReduceOp::kProd && !is_complex(dtype)) {
    return Reduction{*type, RedOp::kProd};
  }
  // NCCL's minimum of floating point drops NaN.
  if (is_one({ReduceOp::kMin, ReduceOp::kMax}) && is_integral(dtype)) {
    return Reduction{*type, op == ReduceOp::kMin ? RedOp::kMin : RedOp::kMax};
  }
  return std::nullopt;
}

// Whether elements pass through scratch memory, in another type or multiplied.
bool is_converted(ReduceOp op, DType dtype, bool has_wire_dtype) {
  return has_wire_dtype || op == ReduceOp::kPremulSum ||
         (op == ReduceOp::kMean && dtype == DType::kFloat16);
}

// Whether a list of blocks passes through scratch memory as one tensor.
bool fits_as_one(const Blocks& blocks, std::size_t element_bytes) {
  return !blocks.is_ragged() && blocks.total() * element_bytes <= NcclGroup::kScratchBytes;
}

// NCCL's own sum of each rank's input times that rank's factor, for one launch: NCCL copies it into
// each call that it is given to.
class PremultipliedSum {
 public:
  PremultipliedSum(NcclGroup& group, DataType type, double factor) : group_(group) {
    std::array<std::byte, sizeof(double)> scalar{};  // of the elements' type
    const auto narrow = static_cast<float>(factor);
    switch (type) {
      case DataType::kFloat64:
        std::memcpy(scalar.data(), &factor, sizeof factor);
        break;
      case DataType::kFloat32:
        std::memcpy(scalar.data(), &narrow, sizeof narrow);
        break;
      default:
        narrow_from_float32(type == DataType::kFloat16 ? DType::kFloat16 : DType::kBFloat16,
                            &narrow, scalar.data(), 1);
        break;
    }
    group_.check(
        group_.api().functions().ncclRedOpCreatePreMulSum(
            &op_, scalar.data(), type, nccl::ScalarResidence::kHostImmediate, group_.comm()),
        "ncclRedOpCreatePreMulSum");
  }
  PremultipliedSum(const PremultipliedSum&) = delete;
  PremultipliedSum& operator=(const PremultipliedSum&) = delete;
  ~PremultipliedSum() {
    try {
      static_cast<void>(group_.api().functions().ncclRedOpDestroy(op_, group_.comm()));
    } catch (const std::exception&) {
      // The group has failed: it goes with the communicator.
    }
  }

  [[nodiscard]] RedOp op() const noexcept { return op_; }

 private:
  NcclGroup& group_;
  RedOp op_ = RedOp::kSum;
};

class Enqueuing {
 public:
  Enqueuing(NcclGroup& group, const NcclSettings& settings, const Call& call)
      : group_(group),
        nccl_(group.api().functions()),
        settings_(settings),
        call_(call),
        bytes_(element_size(call.dtype)) {}

  void run() {
    switch (call_.kind) {
      case OpKind::kAllReduce:
      case OpKind::kReduceScatter:
      case OpKind::kReduce:
        reduce();
        break;
      case OpKind::kAllGather:
        all_gather();
        break;
      case OpKind::kBroadcast:
        broadcast();
        break;
      case OpKind::kGather:
      case OpKind::kScatter:
      case OpKind::kAllToAll:
        exchange();
        break;
      default:
        PYDIST_CHECK(!"a collective with buffers");
    }
  }

 private:
  [[nodiscard]] bool is_root() const { return group_.rank() == call_.root; }

  void copy(void* to, const void* from, std::size_t bytes) {
    if (to != from) {
      cuda::Driver::get().copy(to, from, bytes, group_.stream());
    }
  }

  // ---- reductions -------------------------------------------------------------------------

  void reduce() {
    const bool has_wire = call_.wire_dtype != call_.dtype;
    const std::optional<Reduction> reduction = reduction_of(call_.op, call_.dtype);
    const bool converts = settings_.has_kernels() && is_converted(call_.op, call_.dtype, has_wire);
    // NCCL scatters equal blocks only.
    const bool is_ragged = call_.kind == OpKind::kReduceScatter && call_.inputs.is_ragged();
    const bool takes_ring = settings_.pins_ring || !reduction || (converts && is_ragged);
    if (converts && !takes_ring) {
      reduce_converted();
      return;
    }
    PYDIST_CHECK(call_.device_factor.numerator == nullptr);
    if (takes_ring) {
      reduce_on_ring(group_, *settings_.kernels, call_);
    } else {
      reduce_directly(*reduction);
    }
  }

  void reduce_with_nccl(const Reduction& reduction, const void* in, void* out, std::size_t count) {
    count *= reduction.width;
    switch (call_.kind) {
      case OpKind::kAllReduce:
        group_.call("ncclAllReduce", nccl_.ncclAllReduce, in, out, count, reduction.type,
                    reduction.op);
        break;
      case OpKind::kReduceScatter:
        group_.call("ncclReduceScatter", nccl_.ncclReduceScatter, in, out, count, reduction.type,
                    reduction.op);
        break;
      default:
        reduce_to(call_.root, reduction, in, out, count);
        break;
    }
  }

  // `count` in NCCL's elements.
  void reduce_to(int root, const Reduction& reduction, const void* in, void* out,
                 std::size_t count) {
    group_.call("ncclReduce", nccl_.ncclReduce, in, out, count, reduction.type, reduction.op, root);
  }

  void reduce_directly(Reduction reduction) {
    const bool averages = call_.op == ReduceOp::kMean;
    if (averages && !settings_.has_kernels()) {
      reduction.op = RedOp::kAvg;
    }
    std::optional<PremultipliedSum> premultiplied;  // without kernels
    if (call_.op == ReduceOp::kPremulSum) {
      reduction.op = premultiplied.emplace(group_, reduction.type, call_.factor).op();
    }
    const Block out = call_.outputs.empty() ? Block{} : call_.outputs[0];
    const bool is_list = call_.kind == OpKind::kReduceScatter && !call_.inputs.is_contiguous();
    if (is_list && fits_as_one(call_.inputs, bytes_)) {
      std::byte* const scratch = group_.scratch();
      for (int rank = 0; rank < group_.size(); ++rank) {
        copy(scratch + static_cast<std::size_t>(rank) * call_.count * bytes_,
             call_.inputs[rank].data, call_.count * bytes_);
      }
      reduce_with_nccl(reduction, scratch, out.data, call_.count);
    } else if (is_list) {
      group_.grouped([&] {
        for (int rank = 0; rank < group_.size(); ++rank) {
          const Block block = call_.inputs[rank];
          reduce_to(rank, reduction, block.data, rank == group_.rank() ? out.data : nullptr,
                    block.count * reduction.width);
        }
      });
    } else {
      reduce_with_nccl(reduction, call_.inputs[0].data, out.data, call_.count);
    }
    if (averages && settings_.has_kernels() && out.data != nullptr) {
      finish(out.data, call_.dtype, out, static_cast<double>(group_.size()));
    }
  }

  void reduce_converted() {
    const DType type = summing_type(call_);
    const Reduction reduction = *reduction_of(ReduceOp::kSum, type);
    const ScaledMean mean = is_scaled_mean(call_.op, type)
                                ? scaled_mean(group_.size())
                                : ScaledMean{.divisor = static_cast<double>(group_.size())};
    const double factor = mean.factor * (call_.op == ReduceOp::kPremulSum ? call_.factor : 1.0);
    if (call_.kind == OpKind::kAllReduce && type == call_.dtype) {
      // Multiplied where the result goes, in one launch of NCCL's.
      std::byte* const out = call_.outputs[0].data;
      convert(call_.inputs[0].data, type, out, type, call_.count, factor);
      reduce_with_nccl(reduction, out, out, call_.count);
      return;
    }
    const bool scatters = call_.kind == OpKind::kReduceScatter;
    const int blocks = scatters ? group_.size() : 1;
    const std::size_t most =
        NcclGroup::kScratchBytes / element_size(type) / static_cast<std::size_t>(blocks) / 64 * 64;
    std::byte* const scratch = group_.scratch();
    for (std::size_t begin = 0; begin < call_.count; begin += most) {
      const std::size_t count = std::min(most, call_.count - begin);
      const std::size_t stride = count * element_size(type);
      for (int i = 0; i < blocks; ++i) {
        convert(call_.inputs[i].data + begin * bytes_, call_.dtype,
                scratch + static_cast<std::size_t>(i) * stride, type, count, factor);
      }
      std::byte* const result =
          scratch + (scatters ? static_cast<std::size_t>(group_.rank()) * stride : 0);
      reduce_with_nccl(reduction, scratch, result, count);
      if (!call_.outputs.empty()) {
        const Block out{call_.outputs[0].data + begin * bytes_, count};
        if (type == call_.dtype) {
          copy(out.data, result, count * bytes_);
        } else {
          finish(result, type, out, mean.divisor);
        }
      }
    }
  }

  void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
               std::size_t count, double scale) {
    // Complex numbers are pairs of reals to a real factor.
    if (is_complex(from_dtype)) {
      from_dtype = to_dtype = from_dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
      count *= 2;
    }
    const PydistCudaSegment segment{from, to, count, from_dtype, to_dtype};
    settings_.kernels->convert(PydistCudaConvert{&segment, 1, scale, call_.device_factor.numerator,
                                                 call_.device_factor.denominator},
                               group_.stream());
  }

  // A sum becomes the result: divided where the operator is a mean, and in the call's type.
  void finish(const void* sum, DType type, Block out, double divisor) {
    settings_.kernels->reduce(
        PydistCudaReduce{
            .inputs = &sum,
            .input_dtypes = &type,
            .factors = nullptr,
            .output = out.data,
            .count = out.count,
            .divisor = divisor,
            .input_count = 1,
            .op = call_.op == ReduceOp::kMean ? ReduceOp::kMean : ReduceOp::kSum,
            .output_dtype = call_.dtype,
            .wire_dtype = call_.wire_dtype == call_.dtype ? DType::kFloat32 : call_.wire_dtype,
        },
        group_.stream());
  }

  // ---- movements --------------------------------------------------------------------------

  void all_gather() {
    const Block in = call_.inputs[0];
    if (settings_.pins_ring) {
      all_gather_on_ring(group_, call_);
      return;
    }
    if (call_.outputs.is_contiguous()) {
      all_gather_bytes(in, call_.outputs.buffers()[0].data);
      return;
    }
    if (fits_as_one(call_.outputs, bytes_)) {
      std::byte* const scratch = group_.scratch();
      const std::size_t bytes = in.count * bytes_;
      all_gather_bytes(in, scratch);
      for (int rank = 0; rank < group_.size(); ++rank) {
        copy(call_.outputs[rank].data, scratch + static_cast<std::size_t>(rank) * bytes, bytes);
      }
      return;
    }
    group_.grouped([&] {
      for (int rank = 0; rank < group_.size(); ++rank) {
        const Block out = call_.outputs[rank];
        broadcast_bytes(rank == group_.rank() ? in.data : out.data, out.data, out.count, rank);
      }
    });
  }

  void all_gather_bytes(Block in, void* out) {
    group_.call("ncclAllGather", nccl_.ncclAllGather, in.data, out, in.count * bytes_,
                DataType::kUint8);
  }

  void broadcast() {
    std::byte* const out = call_.outputs.empty() ? call_.inputs[0].data : call_.outputs[0].data;
    broadcast_bytes(is_root() ? call_.inputs[0].data : out, out, call_.count, call_.root);
  }

  void broadcast_bytes(const void* in, void* out, std::size_t count, int root) {
    if (count != 0) {
      group_.call("ncclBroadcast", nccl_.ncclBroadcast, in, out, count * bytes_, DataType::kUint8,
                  root);
    }
  }

  // gather, scatter and all_to_all are messages. Both ends of a message cut it into the same
  // pieces. A rank that receives into the memory that it sends from copies the input to scratch
  // memory.
  void exchange() {
    const auto ranks = static_cast<std::size_t>(group_.size());
    const std::size_t most = std::max<std::size_t>(NcclGroup::kScratchBytes / ranks / bytes_, 1);
    const int rank = group_.rank();
    std::size_t longest = 0;
    bool is_in_place = false;
    for (int peer = 0; peer < group_.size(); ++peer) {
      const Block to = call_.sent_to(peer);
      const Block from = call_.received_from(peer);
      longest = std::max({longest, peer == rank ? 0 : to.count, peer == rank ? 0 : from.count});
      is_in_place |= peer != rank && to.count != 0 && to.data == from.data;
    }
    copy_own(call_.sent_to(rank), call_.received_from(rank));
    for (std::size_t begin = 0; begin < longest; begin += most) {
      const auto piece = [&](Block block) {
        const std::size_t start = std::min(begin, block.count);
        return Block{block.data + start * bytes_, std::min(most, block.count - start)};
      };
      std::byte* const scratch = is_in_place ? group_.scratch() : nullptr;
      const auto outgoing = [&](int peer) {
        return is_in_place ? scratch + static_cast<std::size_t>(peer) * most * bytes_
                           : piece(call_.sent_to(peer)).data;
      };
      for (int peer = 0; is_in_place && peer < group_.size(); ++peer) {
        if (peer != rank) {
          copy(outgoing(peer), piece(call_.sent_to(peer)).data,
               piece(call_.sent_to(peer)).count * bytes_);
        }
      }
      group_.grouped([&] {
        for (int peer = 0; peer < group_.size(); ++peer) {
          if (peer == rank) {
            continue;
          }
          send_on_nccl(group_, outgoing(peer), piece(call_.sent_to(peer)).count * bytes_, peer);
          const Block from = piece(call_.received_from(peer));
          receive_on_nccl(group_, from.data, from.count * bytes_, peer);
        }
      });
    }
  }

  void copy_own(Block from, Block to) {
    if (from.data != nullptr && to.data != nullptr) {
      copy(to.data, from.data, from.count * bytes_);
    }
  }

  NcclGroup& group_;
  const nccl::Functions& nccl_;
  const NcclSettings& settings_;
  const Call& call_;
  const std::size_t bytes_;  // of an element
};

}  // namespace

const char* numerics_on_nccl(const NcclSettings& settings) noexcept {
  if (settings.pins_ring) {
    return settings.has_kernels()
               ? "elements are combined in ring order by pydist's kernels, 16-bit types in "
                 "float32 with one rounding; a mean divides the sum once, in float32 or wider; "
                 "min and max propagate NaN."
               : "nothing is reduced, as the ring needs pydist's kernels.";
  }
  return settings.has_kernels()
             ? "elements are combined by NCCL in an order of its own; sums of float16 and "
               "bfloat16 are rounded at every step, but for means and premul_sums of float16 and "
               "premul_sums of bfloat16, which are summed in float32 and rounded once; a mean "
               "divides the sum once, in float32 or wider; min and max propagate NaN."
             : "elements are combined by NCCL in an order of its own; sums of float16 and "
               "bfloat16 are rounded at every step, and so are a mean and a premul_sum, each "
               "input times its factor first, which is rounded to the type; a mean is NCCL's "
               "average.";
}

std::string why_not_on_nccl(const NcclSettings& settings, OpKind kind, ReduceOp op, DType dtype,
                            bool has_wire_dtype) {
  if (!has_op(kind)) {
    return {};
  }
  if (!is_supported(op, dtype)) {
    return join("op '", to_string(op), "' is not defined for ", to_string(dtype));
  }
  const bool is_plain = reduction_of(op, dtype) && !settings.pins_ring && !has_wire_dtype;
  if (!settings.has_kernels() && !is_plain) {
    return join(
        "op '", to_string(op), "' of ", to_string(dtype), has_wire_dtype ? " in a wire type" : "",
        settings.pins_ring ? " on the ring" : "",
        " needs pydist's CUDA kernels, which this group does without: ", settings.why_no_kernels,
        ". Build pydist with the nvcc of a CUDA that the driver knows, or set "
        "PYDIST_BACKEND=native (on several hosts, gloo), which needs none of them");
  }
  return {};
}

bool needs_one_form(const NcclSettings& settings, const Operation& operation, int size) {
  if (settings.pins_ring || size == 1 ||
      (operation.kind != OpKind::kAllGather && operation.kind != OpKind::kReduceScatter)) {
    return false;
  }
  const Buffers& buffers =
      operation.kind == OpKind::kAllGather ? operation.outputs : operation.inputs;
  const DType dtype = buffers[0].dtype;
  const Blocks blocks(buffers, size);
  if (blocks.is_ragged() || fits_as_one(blocks, element_size(dtype))) {
    return false;
  }
  const bool has_wire = operation.wire_dtype && *operation.wire_dtype != dtype;
  return operation.kind == OpKind::kAllGather ||
         (reduction_of(operation.op, dtype) &&
          !(settings.has_kernels() && is_converted(operation.op, dtype, has_wire)));
}

void enqueue_on_nccl(NcclGroup& group, const NcclSettings& settings, const Operation& operation) {
  const Call call = resolve(operation, group.rank(), group.size());
  Enqueuing(group, settings, call).run();
}

}  // namespace pydist
