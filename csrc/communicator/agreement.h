// Whether all ranks of a group called the same collective with the same arguments, for backends
// that do not ask themselves.
//
// Ranks of gloo or NCCL that disagree wait for each other, get each other's bytes, or crash. So
// every collective on them can start with a small all_gather of what each rank called, by whatever
// means the backend has.

#pragma once

#include <cstddef>
#include <functional>

#include "communicator/operation.h"

namespace pydist {

// all[r] = rank r's `mine`, each of `bytes` bytes.
using AllGatherBytes = std::function<void(const void* mine, void* all, std::size_t bytes)>;

// Collective. Throws the same Mismatch on every rank where they disagree, before data moves.
void check_agreement(const Operation& operation, int rank, int size,
                     const AllGatherBytes& all_gather);

}  // namespace pydist
