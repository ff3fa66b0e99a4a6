// Whether all ranks of a group called the same collective with the same arguments, for backends
// that do not check that themselves.
//
// Ranks of gloo or NCCL that disagree wait for each other, get each other's bytes, or crash. So
// every collective on them can start with a small all_gather of what each rank called, by whatever
// means the backend has.

#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "communicator/operation.h"

namespace pydist {

// all[r] = rank r's `mine`, each of `bytes` bytes.
using AllGatherBytes = std::function<void(const void* mine, void* all, std::size_t bytes)>;

// Collective. Throws the same Mismatch on every rank where they disagree, before data moves. With
// `needs_one_form`, which all ranks find alike, also where the blocks of all_gather or
// reduce_scatter are one tensor here and a list there.
void check_agreement(const Operation& operation, int rank, int size,
                     const AllGatherBytes& all_gather, bool needs_one_form = false);

// How the blocks of an all_gather or a reduce_scatter are given: "in one tensor", "in a list".
[[nodiscard]] std::string_view form_of_blocks(const Operation& operation, int size);

}  // namespace pydist
