#include "collectives/roofline.h"

#include "base/error.h"
#include "collectives/slices.h"
#include "collectives/streaming_hint.h"

namespace pydist {
namespace {

void require_buffers(const Roofline::Case& all) {
  const std::size_t size = all.inputs.size();
  const auto is_rank = [&](int rank) { return rank >= 0 && static_cast<std::size_t>(rank) < size; };
  if (size == 0 || all.outputs.size() != size || !is_rank(all.rank) || !is_rank(all.root)) {
    throw InvalidUsage(
        join("A roofline needs an input and an output of every rank, and the ranks "
             "among them: ",
             size, " inputs, ", all.outputs.size(), " outputs, rank ", all.rank, ", root ",
             all.root, "."));
  }
}

}  // namespace

Roofline::Roofline(const Case& all)
    : reduction_{all.dtype, all.op, 1.0, {}}, hint_(StoreHint::kCached) {
  require_buffers(all);
  const std::size_t size = all.inputs.size();
  const auto me = static_cast<std::size_t>(all.rank);
  const auto root = static_cast<std::size_t>(all.root);
  const std::size_t element = element_size(all.dtype);
  const std::size_t bytes = all.count * element;
  hint_ = hint_for(bytes);
  factors_.assign(size, 1.0);
  reduction_.divisor = static_cast<double>(size);

  switch (all.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: {
      const Slice mine = Slices(all.count, static_cast<int>(size), element)[all.rank];
      for (std::size_t rank = 0; rank < size; ++rank) {
        if (all.kind == OpKind::kAllReduce || rank == root) {
          targets_.push_back(all.outputs[rank] + mine.begin * element);
        }
      }
      add_sources(all.inputs, mine.begin * element);
      reduced_ = mine.count;
      break;
    }
    case OpKind::kReduceScatter:
      targets_ = {all.outputs[me]};
      add_sources(all.inputs, me * bytes);
      reduced_ = all.count;
      break;
    case OpKind::kAllGather:
      for (std::size_t turn = 0; turn < size; ++turn) {
        add_copy(all.outputs[(me + turn) % size] + me * bytes, all.inputs[me], bytes);
      }
      break;
    // One to all, or all to one: each rank, the root too, copies its slice of every block.
    case OpKind::kBroadcast:
    case OpKind::kGather:
    case OpKind::kScatter: {
      const Slice mine = Slices(all.count, static_cast<int>(size), element)[all.rank];
      const std::size_t offset = mine.begin * element;
      for (std::size_t rank = 0; rank < size; ++rank) {
        const std::size_t block = rank * bytes + offset;
        if (all.kind == OpKind::kGather) {
          add_copy(all.outputs[root] + block, all.inputs[rank] + offset, mine.count * element);
        } else if (all.kind == OpKind::kScatter) {
          add_copy(all.outputs[rank] + offset, all.inputs[root] + block, mine.count * element);
        } else if (rank != root) {
          add_copy(all.outputs[rank] + offset, all.inputs[root] + offset, mine.count * element);
        }
      }
      break;
    }
    case OpKind::kAllToAll:
      for (std::size_t turn = 0; turn < size; ++turn) {
        const std::size_t peer = (me + turn) % size;
        add_copy(all.outputs[me] + peer * bytes, all.inputs[peer] + me * bytes, bytes);
      }
      break;
    case OpKind::kSend:
    case OpKind::kRecv:
      add_copy(all.outputs[me], all.inputs[(me + size - 1) % size], bytes);
      break;
    case OpKind::kBarrier:
    case OpKind::kAllocate:
      break;
  }
}

void Roofline::add_copy(std::byte* target, const std::byte* source, std::size_t bytes) {
  if (target != source && bytes != 0) {
    copies_.push_back({target, source, bytes});
  }
}

void Roofline::add_sources(const std::vector<std::byte*>& inputs, std::size_t offset) {
  for (const std::byte* input : inputs) {
    sources_.push_back(input + offset);
  }
}

void Roofline::run() const {
  if (reduced_ != 0) {
    Reduction reduction = reduction_;
    reduction.factors = factors_;
    reduce(reduction, sources_, targets_, reduced_, hint_);
  }
  for (const Copy& copy : copies_) {
    copy_bytes(copy.target, copy.source, copy.bytes, hint_);
  }
}

}  // namespace pydist
