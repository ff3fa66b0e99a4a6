#include "nccl_operators.h"

#include <map>
#include <mutex>

#include "nccl.h"
#include "nccl_communicator.h"
#include "nccl_values.h"

namespace fake_nccl {
namespace {

constexpr int kOpCount = 5;  // that every communicator has; others have greater numbers
constexpr int kScalarHostImmediate = 1;

// What communicators have been given of ncclRedOpCreatePreMulSum.
struct OwnOp {
  void* comm;
  int type;
  double factor;
};
std::mutex own_ops_mutex;
std::map<int, OwnOp> own_ops;  // by the operator's number; guarded by own_ops_mutex
int next_op = kOpCount;        // guarded by own_ops_mutex

}  // namespace

Operator operator_of(void* comm, int op, int type) {
  if (op < kOpCount) {
    return {op};
  }
  const std::lock_guard lock(own_ops_mutex);
  const auto found = own_ops.find(op);
  if (found == own_ops.end() || found->second.comm != comm || found->second.type != type) {
    return {-1};
  }
  return {kPreMulSum, found->second.factor};
}

void forget_operators_of(void* comm) {
  const std::lock_guard lock(own_ops_mutex);
  std::erase_if(own_ops, [&](const auto& each) { return each.second.comm == comm; });
}

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, void* handle) {
  const CommPtr comm = find(handle);
  if (comm == nullptr || residence != kScalarHostImmediate || type < 6 || type > 9) {
    return kInvalidArgument;
  }
  if (const Result refusal = refusal_of(*comm); refusal != kSuccess) {
    return refusal;
  }
  const std::lock_guard lock(own_ops_mutex);
  own_ops[next_op] = {handle, type, scalar_at(scalar, type)};
  *op = next_op++;
  return kSuccess;
}

int ncclRedOpDestroy(int op, void* comm) {
  const std::lock_guard lock(own_ops_mutex);
  const auto found = own_ops.find(op);
  if (found == own_ops.end() || found->second.comm != comm) {
    return kInvalidArgument;
  }
  own_ops.erase(found);
  return kSuccess;
}

int fake_nccl_operators() {
  const std::lock_guard lock(own_ops_mutex);
  return static_cast<int>(own_ops.size());
}
}
