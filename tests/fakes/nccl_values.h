// Values of NCCL's types: what the fake NCCL computes with them.

#pragma once

#include <cstddef>
#include <cstring>

namespace fake_nccl {

// As NCCL numbers them.
enum RedOp { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4, kPreMulSum = 5 };

// Buffers without elements may be null.
inline void move_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) {
    std::memmove(to, from, bytes);
  }
}

// Bytes of a value of a type, which is a number of NCCL's.
std::size_t size_of(int type);

// total = total op values. 16-bit types round after every step, as NCCL's do.
void accumulate(char* total, const char* values, std::size_t count, int type, int op);

// values *= factor, which is rounded to their type first.
void multiply(char* values, std::size_t count, int type, double factor);

double scalar_at(const void* data, int type);

}  // namespace fake_nccl
