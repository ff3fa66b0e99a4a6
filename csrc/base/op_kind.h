// The kinds of operation that a communicator runs; operation.h says what each takes.

#pragma once

#include <cstdint>
#include <string_view>

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

[[nodiscard]] std::string_view to_string(OpKind kind) noexcept;

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
