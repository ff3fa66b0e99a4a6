// Memory that the fake NCCL has allocated, and the communicators that know it.

#pragma once

#include <cstddef>
#include <vector>

namespace fake_nccl {

bool is_registered(void* comm, const void* data);

void forget_memory_of(void* comm);

// What an operation writes to.
struct Output {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// How often fake_nccl_end_strays() has been called.
int times_strays_ended();
// What nobody may rely on after an abort.
void write_late(const std::vector<Output>& outputs);

}  // namespace fake_nccl
