// Memory that the fake NCCL has allocated, and the communicators that know it.

#pragma once

namespace fake_nccl {

bool is_registered(void* comm, const void* data);

void forget_memory_of(void* comm);

}  // namespace fake_nccl
