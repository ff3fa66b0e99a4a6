#include "communicator/gathered_call_mismatch.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/error.h"
#include "collectives/call.h"

namespace pydist {
namespace {

// Kinds in which a rank sends each other one a block of its own, or only one rank knows all blocks.
bool is_pairwise(OpKind kind) {
  return kind == OpKind::kGather || kind == OpKind::kScatter || kind == OpKind::kAllToAll;
}

std::vector<std::uint64_t> block_counts(const Buffers& buffers, int size) {
  const Blocks blocks(buffers, size);
  std::vector<std::uint64_t> counts;
  for (int rank = 0; rank < size; ++rank) {
    counts.push_back(blocks[rank].count);
  }
  return counts;
}

// What every rank must have in common; plain bytes, as it travels.
struct Record {
  std::uint8_t kind = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t wire_dtype = 0;
  std::int32_t root = 0;
  std::uint64_t count = 0;   // elements of the buffer, or of all blocks together
  std::uint64_t blocks = 0;  // digest of the blocks' sizes
  std::uint64_t form = 0;    // one tensor or a list; 0 where the ranks may differ in that

  friend bool operator==(const Record&, const Record&) = default;
};

constexpr std::array<std::string_view, 2> kForms{"in one tensor", "in a list"};

std::size_t form_index(const Operation& operation, int size) {
  const Buffers& blocks =
      operation.kind == OpKind::kAllGather ? operation.outputs : operation.inputs;
  return blocks.size() == static_cast<std::size_t>(size) ? 1 : 0;
}

std::uint64_t digest(const std::vector<std::uint64_t>& counts) {
  Digest digest;
  for (const std::uint64_t count : counts) {
    digest.add(count);
  }
  return digest.value();
}

Record make_record(const Operation& operation, int size) {
  Record record;
  const auto& in = operation.inputs;
  const auto& out = operation.outputs;
  record.kind = static_cast<std::uint8_t>(operation.kind);
  if (!in.empty() || !out.empty()) {
    const DType dtype = (in.empty() ? out : in)[0].dtype;
    record.dtype = static_cast<std::uint8_t>(dtype);
    record.wire_dtype = static_cast<std::uint8_t>(operation.wire_dtype.value_or(dtype));
  }
  record.op = has_op(operation.kind) ? static_cast<std::uint8_t>(operation.op) : std::uint8_t{0};
  record.root = has_root(operation.kind) ? operation.peer : 0;
  if (operation.kind == OpKind::kReduceScatter || operation.kind == OpKind::kAllGather) {
    const auto counts = block_counts(operation.kind == OpKind::kAllGather ? out : in, size);
    for (const std::uint64_t count : counts) {
      record.count += count;
    }
    record.blocks = digest(counts);
  } else if (!is_pairwise(operation.kind) && operation.kind != OpKind::kBarrier) {
    record.count = (in.empty() ? out : in)[0].count;
  }
  return record;
}

std::string call_text(const Record& record) {
  const auto kind = static_cast<OpKind>(record.kind);
  if (kind == OpKind::kBarrier) {
    return "barrier";
  }
  std::string text = join(to_string(kind), "(", to_string(static_cast<DType>(record.dtype)));
  if (record.wire_dtype != record.dtype) {
    text += join(" travelling as ", to_string(static_cast<DType>(record.wire_dtype)));
  }
  if (!is_pairwise(kind)) {
    text += join(", ", record.count, " elements");
  }
  if (record.form != 0) {
    text += join(" ", kForms.at(record.form - 1));
  }
  if (has_op(kind)) {
    text += join(", ", to_string(static_cast<ReduceOp>(record.op)));
  }
  if (has_root(kind)) {
    text += join(", root ", record.root);
  }
  return text + ")";
}

[[noreturn]] void throw_mismatch(const std::string& detail, std::size_t one, std::size_t other) {
  throw Mismatch(join("Ranks disagree about a collective of their group: ", detail,
                      ". Every rank of a group must call the same collectives in the same order "
                      "with matching arguments."),
                 Blame{.ranks = {static_cast<int>(std::min(one, other)),
                                 static_cast<int>(std::max(one, other))},
                       .cause = "ranks called different collectives"});
}

// Elements that this rank sends to each rank, then those that it expects from each.
std::vector<std::uint64_t> pairwise_counts(const Operation& operation, int rank, int size) {
  const auto ranks = static_cast<std::size_t>(size);
  std::vector<std::uint64_t> counts(2 * ranks, 0);
  const auto root = static_cast<std::size_t>(operation.peer);
  const bool is_root = rank == operation.peer;
  const auto put = [&](std::size_t at, const Buffers& blocks) {
    const auto all = block_counts(blocks, size);
    std::copy(all.begin(), all.end(), counts.begin() + static_cast<std::ptrdiff_t>(at));
  };
  switch (operation.kind) {
    case OpKind::kGather:
      counts[root] = operation.inputs[0].count;
      if (is_root) {
        put(ranks, operation.outputs);
      }
      break;
    case OpKind::kScatter:
      counts[ranks + root] = operation.outputs[0].count;
      if (is_root) {
        put(0, operation.inputs);
      }
      break;
    default:
      put(0, operation.inputs);
      put(ranks, operation.outputs);
      break;
  }
  return counts;
}

}  // namespace

std::string_view form_of_blocks(const Operation& operation, int size) {
  return kForms.at(form_index(operation, size));
}

void check_agreement(const Operation& operation, int rank, int size,
                     const AllGatherBytes& all_gather, bool needs_one_form) {
  if (size == 1) {
    return;
  }
  const auto ranks = static_cast<std::size_t>(size);
  Record mine = make_record(operation, size);
  if (needs_one_form) {
    mine.form = 1 + form_index(operation, size);
  }
  std::vector<Record> all(ranks);
  all_gather(&mine, all.data(), sizeof mine);
  for (std::size_t other = 1; other < ranks; ++other) {
    if (all[other] != all[0]) {
      throw_mismatch(join("rank 0 called ", call_text(all[0]), ", but rank ", other, " called ",
                          call_text(all[other]),
                          all[other].count == all[0].count && all[other].blocks != all[0].blocks
                              ? " with blocks of other sizes"
                              : ""),
                     0, other);
    }
  }
  if (!is_pairwise(operation.kind)) {
    return;
  }
  const auto counts = pairwise_counts(operation, rank, size);
  std::vector<std::uint64_t> table(ranks * counts.size());
  all_gather(counts.data(), table.data(), counts.size() * sizeof counts[0]);
  for (std::size_t from = 0; from < ranks; ++from) {
    for (std::size_t to = 0; to < ranks; ++to) {
      const std::uint64_t sent = table[from * counts.size() + to];
      const std::uint64_t expected = table[to * counts.size() + ranks + from];
      if (sent != expected) {
        throw_mismatch(join("in ", call_text(mine), " rank ", from, " sends ", sent,
                            " elements to rank ", to, ", which expects ", expected),
                       from, to);
      }
    }
  }
}

}  // namespace pydist
