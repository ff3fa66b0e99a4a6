// The kinds of operation that a communicator runs; operation.h says what each takes.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/enum_names.h"

namespace pydist {

enum class OpKind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
  kAllocate,  // internal: agreeing on a block of the symmetric heap
};

inline constexpr auto kOpKindNames = std::to_array<std::string_view>(
    {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
     "all_to_all", "send", "recv", "barrier", "allocate"});
static_assert(kOpKindNames.size() == static_cast<std::size_t>(OpKind::kAllocate) + 1);

[[nodiscard]] constexpr std::string_view to_string(OpKind kind) noexcept {
  return name_in(kOpKindNames, kind, "unknown operation");
}

[[nodiscard]] constexpr bool is_point_to_point(OpKind kind) noexcept {
  return kind == OpKind::kSend || kind == OpKind::kRecv;
}

[[nodiscard]] constexpr bool has_root(OpKind kind) noexcept {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

// Whether it combines elements with a reduce operator.
[[nodiscard]] constexpr bool has_op(OpKind kind) noexcept {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}

}  // namespace pydist
