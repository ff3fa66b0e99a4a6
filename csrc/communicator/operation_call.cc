#include "communicator/operation_call.h"

#include <span>

namespace pydist {

Call resolve(const Operation& operation, int rank, int size) {
  const bool is_root = rank == operation.peer;
  const std::span<const Buffer> in(operation.inputs);
  const std::span<const Buffer> out(operation.outputs);
  const DType dtype = !in.empty() ? in[0].dtype : !out.empty() ? out[0].dtype : DType::kUInt8;
  const auto call = [&](Blocks inputs, Blocks outputs, std::size_t count) {
    return Call{operation.kind,
                dtype,
                operation.wire_dtype.value_or(dtype),
                operation.op,
                has_root(operation.kind) ? operation.peer : 0,
                operation.factor,
                inputs,
                outputs,
                count,
                operation.device_factor};
  };
  switch (operation.kind) {
    case OpKind::kAllReduce:
      return call(Blocks(in, 1), Blocks(out, 1), in[0].count);
    case OpKind::kReduceScatter:
      return call(Blocks(in, size), Blocks(out, 1), out[0].count);
    case OpKind::kAllGather:
      return call(Blocks(in, 1), Blocks(out, size), in[0].count);
    case OpKind::kBroadcast:
      return call(is_root ? Blocks(in, 1) : Blocks(), out.empty() ? Blocks() : Blocks(out, 1),
                  is_root ? in[0].count : out[0].count);
    case OpKind::kReduce:
      return call(Blocks(in, 1), is_root ? Blocks(out, 1) : Blocks(), in[0].count);
    case OpKind::kGather:
      return call(Blocks(in, 1), is_root ? Blocks(out, size) : Blocks(), in[0].count);
    case OpKind::kScatter:
      return call(is_root ? Blocks(in, size) : Blocks(), Blocks(out, 1), out[0].count);
    case OpKind::kAllToAll:
      return call(Blocks(in, size), Blocks(out, size), Blocks(in, size)[rank].count);
    default:
      return call(Blocks(), Blocks(), 0);
  }
}

}  // namespace pydist
