#include "bindings/arguments.h"

#include <span>

#include "base/parse_name.h"

namespace pydist {

KnownProcesses known_processes(const ProcessTuples& tuples) {
  KnownProcesses known;
  for (const auto& [rank, host, pid, started, is_visible] : tuples) {
    known.push_back({.rank = rank,
                     .host = host,
                     .pid = pid,
                     .local_pid = is_visible ? pid : 0,
                     .started = started});
  }
  return known;
}

ReduceOp parse_reduce_op(std::string_view text) {
  // Nearly every call has this one, and a small one takes a microsecond in all.
  if (text == "sum") {
    return ReduceOp::kSum;
  }
  return parse_name<ReduceOp>(kReduceOpNames, text == "avg" ? "mean" : text, "op");
}

OpKind parse_kind(std::string_view text) {
  const std::span names(kOpKindNames);
  return parse_name<OpKind>(names.first(static_cast<std::size_t>(OpKind::kBarrier) + 1), text,
                            "kind");
}

}  // namespace pydist
