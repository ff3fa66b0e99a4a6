#include "communicator/operation_call.h"

#include <span>

namespace pydist {

Call resolve(const Operation& operation, int rank, int size) {
  const bool is_root = rank == operation.peer;
  const std::span<const Buffer> in(operation.inputs);
  const std::span<const Buffer> out(operation.outputs);
  const DType dtype = !in.empty() ? in[0].dtype : !out.empty() ? out[0].dtype : DType::kUInt8;
  Call call{operation.kind,
            dtype,
            operation.wire_dtype.value_or(dtype),
            operation.op,
            /*root=*/0,
            operation.factor,
            Blocks(),
            Blocks(),
            /*count=*/0};
  switch (operation.kind) {
    case OpKind::kAllReduce:
      call.inputs = Blocks(in, 1);
      call.outputs = Blocks(out, 1);
      call.count = in[0].count;
      break;
    case OpKind::kReduceScatter:
      call.inputs = Blocks(in, size);
      call.outputs = Blocks(out, 1);
      call.count = out[0].count;
      break;
    case OpKind::kAllGather:
      call.inputs = Blocks(in, 1);
      call.outputs = Blocks(out, size);
      call.count = in[0].count;
      break;
    case OpKind::kBroadcast:
      call.root = operation.peer;
      call.inputs = is_root ? Blocks(in, 1) : Blocks();
      call.outputs = out.empty() ? Blocks() : Blocks(out, 1);
      call.count = is_root ? in[0].count : out[0].count;
      break;
    case OpKind::kReduce:
      call.root = operation.peer;
      call.inputs = Blocks(in, 1);
      call.outputs = is_root ? Blocks(out, 1) : Blocks();
      call.count = in[0].count;
      break;
    case OpKind::kGather:
      call.root = operation.peer;
      call.inputs = Blocks(in, 1);
      call.outputs = is_root ? Blocks(out, size) : Blocks();
      call.count = in[0].count;
      break;
    case OpKind::kScatter:
      call.root = operation.peer;
      call.inputs = is_root ? Blocks(in, size) : Blocks();
      call.outputs = Blocks(out, 1);
      call.count = out[0].count;
      break;
    case OpKind::kAllToAll:
      call.inputs = Blocks(in, size);
      call.outputs = Blocks(out, size);
      call.count = call.inputs[rank].count;
      break;
    default:
      break;
  }
  return call;
}

}  // namespace pydist
