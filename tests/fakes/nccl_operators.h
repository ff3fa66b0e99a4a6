// Reduce operators of the fake NCCL: those that every communicator has, and those that one has
// made.

#pragma once

namespace fake_nccl {

// As a call copies it.
struct Operator {
  int kind;  // -1 where the communicator has no such operator for the type
  double factor = 1.0;
};

Operator operator_of(void* comm, int op, int type);

void forget_operators_of(void* comm);

}  // namespace fake_nccl
