#include "collective_case.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "collectives/ring.h"
#include "collectives/slices.h"
#include "combined_by_hosts.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kGuardBytes = 64;
constexpr std::byte kGuard{0xA5};

// The bits of a floating-point number with the given exponent range, any sign and mantissa: its
// sums are inexact, so that a wrong order or a rounding too many shows.
std::uint64_t floating_bits(std::uint64_t chance, int mantissa_bits, int exponent_bits) {
  const std::uint64_t bias = (std::uint64_t{1} << (exponent_bits - 1)) - 1;
  const std::uint64_t exponent = bias - 2 + (chance >> 60) % 4;
  const std::uint64_t mantissa = chance & ((std::uint64_t{1} << mantissa_bits) - 1);
  const std::uint64_t sign = (chance >> 59) & 1;
  return (sign << (mantissa_bits + exponent_bits)) | (exponent << mantissa_bits) | mantissa;
}

std::uint64_t element_bits(DType dtype, std::uint64_t chance) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kComplex128:
      return floating_bits(chance, 52, 11);
    case DType::kFloat32:
    case DType::kComplex64:
      return floating_bits(chance, 23, 8);
    case DType::kFloat16:
      return floating_bits(chance, 10, 5);
    case DType::kBFloat16:
      return floating_bits(chance, 7, 8);
    case DType::kBool:
      return chance & 1;
    default:
      return chance;
  }
}

Bytes random_bytes(DType dtype, std::size_t count, std::uint64_t seed) {
  // Complex numbers are two real ones.
  const std::size_t parts = is_complex(dtype) ? 2 : 1;
  const std::size_t part_bytes = element_size(dtype) / parts;
  // Each is written with what the next one overwrites: a sanitizer is slow with copies of a length
  // that the compiler doesn't know.
  auto bytes = std::make_shared<std::vector<std::byte>>(count * element_size(dtype) + 8);
  static_assert(std::endian::native == std::endian::little);
  std::byte* const data = bytes->data();
  for (std::size_t i = 0; i < count * parts; ++i) {
    const std::uint64_t bits = element_bits(dtype, mix(seed + i));
    std::memcpy(data + i * part_bytes, &bits, sizeof bits);
  }
  bytes->resize(count * element_size(dtype));
  return bytes;
}

// A part of every rank's input, and how the parts become one.
struct Parts {
  ReduceOp op;
  DType dtype;
  std::vector<const void*> sources;  // in the order of summation
  std::vector<double> factors;

  void combine_at_once(void* target, std::size_t count) const {
    reduce({dtype, op, static_cast<double>(sources.size()), factors}, sources, {&target, 1}, count);
  }

  // One after the other, each sum in the type of the parts. A mean of float16 is one of terms that
  // a power of two has made so small that their sum stays within its range.
  void combine_one_by_one(void* target, std::size_t count) const {
    if (sources.size() == 1) {
      combine_at_once(target, count);
    }
    const auto ranks = static_cast<double>(sources.size());
    const auto power = static_cast<double>(std::bit_ceil(sources.size()));
    const bool is_scaled = op == ReduceOp::kMean && dtype == DType::kFloat16;
    const ReduceOp own_op = is_scaled ? ReduceOp::kPremulSum : op;
    std::array<const void*, 2> pair{sources[0], nullptr};
    std::array<double, 2> weights{is_scaled ? 1.0 / power : factors[0], 1.0};
    for (std::size_t i = 1; i < sources.size(); ++i) {
      pair[1] = sources[i];
      weights[1] = is_scaled ? 1.0 / power : factors[i];
      const bool is_complete = i + 1 == sources.size();
      if (is_scaled && is_complete) {
        weights[0] *= 1.0 / (ranks / power);
        weights[1] *= 1.0 / (ranks / power);
      }
      reduce({dtype, own_op == ReduceOp::kMean && !is_complete ? ReduceOp::kSum : own_op, ranks,
              weights},
             pair, {&target, 1}, count);
      pair[0] = target;
      weights[0] = 1.0;
    }
  }
};

// Combines elements [begin, begin + count) of the inputs, from rank `first` on, round to it again.
void combine(const Case& what, SummationOrder order, std::span<const Bytes> inputs, int first,
             std::size_t begin, std::size_t count, std::vector<std::byte>& output) {
  if (count == 0) {
    return;
  }
  const int size = static_cast<int>(inputs.size());
  const std::size_t offset = begin * element_size(what.dtype);
  Parts parts{what.op, what.wire_dtype.value_or(what.dtype), {}, {}};
  std::vector<std::vector<std::byte>> travelled;
  for (int turn = 0; turn < size; ++turn) {
    const int rank = (first + turn) % size;
    const std::byte* source = inputs[static_cast<std::size_t>(rank)]->data() + offset;
    if (what.wire_dtype) {
      auto& narrow = travelled.emplace_back(count * element_size(parts.dtype));
      narrow_from_float32(parts.dtype, reinterpret_cast<const float*>(source), narrow.data(),
                          count);
      source = narrow.data();
    }
    parts.sources.push_back(source);
    parts.factors.push_back(premul_factor(rank));
  }
  std::byte* const target = output.data() + offset;
  if (!what.wire_dtype) {
    parts.combine_at_once(target, count);
    return;
  }
  std::vector<std::byte> result(count * element_size(parts.dtype));
  if (order == SummationOrder::kRing) {
    parts.combine_one_by_one(result.data(), count);
  } else {
    parts.combine_at_once(result.data(), count);
  }
  widen_to_float32(parts.dtype, result.data(), reinterpret_cast<float*>(target), count);
}

// Inputs of one block (each rank's) combined.
Bytes combined_block(const Case& what, SummationOrder order, std::span<const Bytes> inputs,
                     int first) {
  auto output = std::make_shared<std::vector<std::byte>>(inputs[0]->size());
  combine(what, order, inputs, first, 0, inputs[0]->size() / element_size(what.dtype), *output);
  return output;
}

// A ring's all_reduce: each rank's slice of the buffer has an order of its own.
Bytes combined_in_ring_order(const Case& what, std::span<const Bytes> inputs) {
  const int size = static_cast<int>(inputs.size());
  const std::size_t element_bytes = element_size(what.dtype);
  auto output = std::make_shared<std::vector<std::byte>>(inputs[0]->size());
  const Slices slices(inputs[0]->size() / element_bytes, size, element_bytes);
  for (int chunk = 0; chunk < size; ++chunk) {
    combine(what, SummationOrder::kRing, inputs, (chunk + 1) % size, slices[chunk].begin,
            slices[chunk].count, *output);
  }
  return output;
}

std::size_t total_bytes(std::span<const Bytes> blocks) {
  return std::accumulate(blocks.begin(), blocks.end(), std::size_t{0},
                         [](std::size_t sum, const Bytes& block) { return sum + block->size(); });
}

}  // namespace

std::uint64_t mix(std::uint64_t word) {  // splitmix64
  word += 0x9E3779B97F4A7C15ULL;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
  return word ^ (word >> 31);
}

double premul_factor(int rank) { return 0.7 + 0.3 * rank; }

std::string to_string(Placement placement) {
  switch (placement) {
    case Placement::kOrdinary:
      return "Ordinary";
    case Placement::kHeap:
      return "Heap";
    case Placement::kMixed:
      return "Mixed";
    case Placement::kShared:
      return "Shared";
    case Placement::kSharedMixed:
      return "SharedMixed";
    case Placement::kBothHeaps:
      return "BothHeaps";
  }
  return {};
}

std::string Case::to_string() const {
  std::string text = join(pydist::to_string(kind), " ", pydist::to_string(dtype));
  if (is_reduction(kind)) {
    text += join(" ", pydist::to_string(op));
  }
  if (wire_dtype) {
    text += join(" as ", pydist::to_string(*wire_dtype));
  }
  if (has_root(kind)) {
    text += join(" root ", root);
  }
  text += join(is_flat ? " flat" : " list", is_in_place ? " in place" : "", " counts");
  for (const std::size_t count : counts) {
    text += join(" ", count);
  }
  return text;
}

std::vector<std::size_t> equal_counts(OpKind kind, int size, std::size_t count) {
  const auto ranks = static_cast<std::size_t>(size);
  switch (kind) {
    case OpKind::kAllReduce:
    case OpKind::kBroadcast:
    case OpKind::kReduce:
      return {count};
    case OpKind::kAllToAll:
      return std::vector<std::size_t>(ranks * ranks, count);
    case OpKind::kBarrier:
      return {};
    default:
      return std::vector<std::size_t>(ranks, count);
  }
}

std::vector<std::size_t> ragged_counts(OpKind kind, int size, std::size_t count,
                                       std::uint64_t seed) {
  std::vector<std::size_t> counts = equal_counts(kind, size, count);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::uint64_t chance = mix(seed + i);
    counts[i] = chance % 4 == 0 ? 0 : (chance >> 8) % (2 * count + 1);
  }
  return counts;
}

Case any_case(OpKind kind, DType dtype, ReduceOp op, int size, std::size_t count,
              std::uint64_t seed) {
  const std::uint64_t chance = mix(seed);
  Case what;
  what.kind = kind;
  what.dtype = dtype;
  what.op = op;
  what.seed = seed;
  what.root = has_root(kind) ? static_cast<int>(chance % static_cast<std::uint64_t>(size)) : 0;
  what.counts = equal_counts(kind, size, count);
  what.is_flat = !has_blocks(kind) || (chance >> 16) % 3 != 0;
  what.is_in_place = (chance >> 24) % 2 == 0;
  return what;
}

PreparedCase prepare(const Case& what, int size, SummationOrder order,
                     const std::vector<int>& hosts) {
  const auto ranks = static_cast<std::size_t>(size);
  const auto root = static_cast<std::size_t>(what.root);
  PreparedCase prepared{what, size, {}, {}};
  auto& in = prepared.inputs;
  auto& out = prepared.outputs;
  in.resize(ranks);
  out.resize(ranks);
  const auto random = [&](std::size_t count, std::size_t rank, std::size_t block) {
    return random_bytes(what.dtype, count, mix(what.seed * 4096 + rank * 64 + block));
  };
  // One block of every rank, combined.
  const auto block_of_all = [&](std::size_t block) {
    std::vector<Bytes> blocks;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      blocks.push_back(in[rank][block]);
    }
    return blocks;
  };
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const bool is_root = rank == root;
    switch (what.kind) {
      case OpKind::kAllReduce:
      case OpKind::kReduce:
        in[rank] = {random(what.counts[0], rank, 0)};
        break;
      case OpKind::kBroadcast:
        if (is_root) {
          in[rank] = {random(what.counts[0], rank, 0)};
        }
        break;
      case OpKind::kAllGather:
      case OpKind::kGather:
        in[rank] = {random(what.counts[rank], rank, 0)};
        break;
      case OpKind::kReduceScatter:
      case OpKind::kScatter:
      case OpKind::kAllToAll:
        if (what.kind == OpKind::kScatter && !is_root) {
          break;
        }
        for (std::size_t block = 0; block < ranks; ++block) {
          const std::size_t index = what.kind == OpKind::kAllToAll ? rank * ranks + block : block;
          in[rank].push_back(random(what.counts[index], rank, block));
        }
        break;
      default:
        break;
    }
  }
  const bool rings = order == SummationOrder::kRing && ring_supports(what.kind);
  Bytes reduced;
  if ((what.kind == OpKind::kAllReduce || what.kind == OpKind::kReduce) && !hosts.empty()) {
    reduced = combined_by_hosts(what, block_of_all(0), hosts);
  } else if (what.kind == OpKind::kAllReduce || what.kind == OpKind::kReduce) {
    reduced = rings ? combined_in_ring_order(what, block_of_all(0))
                    : combined_block(what, SummationOrder::kRanks, block_of_all(0), 0);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const bool is_root = rank == root;
    switch (what.kind) {
      case OpKind::kAllReduce:
        out[rank] = {reduced};
        break;
      case OpKind::kReduce:
        if (is_root) {
          out[rank] = {reduced};
        }
        break;
      case OpKind::kReduceScatter:
        out[rank] = {!hosts.empty()
                         ? combined_by_hosts(what, block_of_all(rank), hosts)
                         : combined_block(what, order, block_of_all(rank),
                                          rings ? (static_cast<int>(rank) + 1) % size : 0)};
        break;
      case OpKind::kAllGather:
        out[rank] = block_of_all(0);
        break;
      case OpKind::kGather:
        if (is_root) {
          out[rank] = block_of_all(0);
        }
        break;
      case OpKind::kBroadcast:
        out[rank] = {in[root][0]};
        break;
      case OpKind::kScatter:
        out[rank] = {in[root][rank]};
        break;
      case OpKind::kAllToAll:
        out[rank] = block_of_all(rank);
        break;
      default:
        break;
    }
  }
  return prepared;
}

CaseBuffers::Arena& CaseBuffers::arena_for(std::size_t bytes, std::uint64_t chance,
                                           Placement placement) {
  const bool is_mixed = placement == Placement::kMixed || placement == Placement::kSharedMixed;
  const bool wants_heap = placement != Placement::kOrdinary && (!is_mixed || (chance & 1) != 0);
  const bool fits = heap_.used + bytes + 4 * kGuardBytes <= heap_.capacity;
  return wants_heap && fits ? heap_ : ordinary_;
}

CaseBuffers::Region CaseBuffers::place(std::size_t bytes, std::size_t alignment,
                                       std::uint64_t chance, Placement placement,
                                       const std::string& name) {
  Arena& arena = arena_for(bytes, chance, placement);
  // Aligned to its elements and no better, so that the kernels' edges are met.
  const std::size_t offset = arena.used + kGuardBytes + (chance >> 8) % 4 * alignment;
  arena.used = (offset + bytes + 2 * kGuardBytes - 1) / kGuardBytes * kGuardBytes;
  regions_.push_back({&arena, offset, name});
  return regions_.back();
}

Operation CaseBuffers::lay_out(const PreparedCase& prepared, int rank, Placement placement) {
  const Case& what = prepared.what;
  const auto index = static_cast<std::size_t>(rank);
  const std::vector<Bytes>& in = prepared.inputs[index];
  const std::vector<Bytes>& out = prepared.outputs[index];
  const std::size_t alignment = element_size(what.dtype);
  std::uint64_t chance = mix(what.seed + 1000 * index);

  // Room for everything in ordinary memory, whatever goes to the heap.
  const std::size_t room = total_bytes(in) + total_bytes(out) +
                           (in.size() + out.size() + 1) * (4 * kGuardBytes + 4 * alignment);
  if (storage_.size() < room) {
    storage_.resize(room);
  }
  ordinary_.data = storage_.data();
  ordinary_.capacity = storage_.size();
  ordinary_.used = 0;
  heap_.used = 0;
  regions_.clear();

  // The places of blocks: in one region behind each other, or in one region each.
  const auto place_blocks = [&](const std::vector<Bytes>& blocks, const char* name) {
    std::vector<Region> places;
    chance = mix(chance);
    if (what.is_flat && !blocks.empty()) {
      Region place_of_all = place(total_bytes(blocks), alignment, chance, placement, name);
      for (const Bytes& block : blocks) {
        places.push_back(place_of_all);
        place_of_all.offset += block->size();
      }
    } else {
      for (std::size_t block = 0; block < blocks.size(); ++block) {
        chance = mix(chance);
        places.push_back(
            place(blocks[block]->size(), alignment, chance, placement, join(name, " ", block)));
      }
    }
    return places;
  };
  std::vector<Region> in_places;
  std::vector<Region> out_places;
  if (!what.is_in_place || in.empty() || out.empty()) {
    in_places = place_blocks(in, "input");
    out_places = place_blocks(out, "output");
  } else if (in.size() >= out.size()) {
    in_places = place_blocks(in, "input");
    out_places = in.size() == out.size() ? in_places : std::vector<Region>{in_places[index]};
  } else {
    out_places = place_blocks(out, "output");
    in_places = {out_places[index]};
  }

  for (Arena* arena : {&ordinary_, &heap_}) {
    arena->expected.assign(arena->used, kGuard);
    if (arena->used != 0) {
      std::memset(arena->data, static_cast<int>(kGuard), arena->used);
    }
  }
  const auto fill = [](const Bytes& block, std::byte* target) {
    if (!block->empty()) {
      std::memcpy(target, block->data(), block->size());
    }
  };
  for (std::size_t block = 0; block < in.size(); ++block) {
    const Region& place = in_places[block];
    fill(in[block], place.arena->data + place.offset);
    fill(in[block], place.arena->expected.data() + place.offset);
  }
  for (std::size_t block = 0; block < out.size(); ++block) {
    const Region& place = out_places[block];
    fill(out[block], place.arena->expected.data() + place.offset);
  }

  Operation operation;
  operation.kind = what.kind;
  operation.op = what.op;
  operation.wire_dtype = what.wire_dtype;
  operation.peer = what.root;
  operation.factor = premul_factor(rank);
  const auto buffers_of = [&](const std::vector<Bytes>& blocks, const std::vector<Region>& places) {
    std::vector<Buffer> buffers;
    for (std::size_t block = 0; block < blocks.size(); ++block) {
      const std::size_t count = blocks[block]->size() / alignment;
      if (block != 0 && what.is_flat) {
        buffers[0].count += count;
      } else {
        buffers.push_back({places[block].arena->data + places[block].offset, count, what.dtype});
      }
    }
    return buffers;
  };
  operation.inputs = buffers_of(in, in_places);
  operation.outputs = buffers_of(out, out_places);
  return operation;
}

std::string CaseBuffers::check() const {
  for (const Arena* arena : {&ordinary_, &heap_}) {
    if (arena->used == 0 || std::memcmp(arena->data, arena->expected.data(), arena->used) == 0) {
      continue;
    }
    const auto wrong = std::mismatch(arena->expected.begin(), arena->expected.end(), arena->data);
    const auto at = static_cast<std::size_t>(wrong.first - arena->expected.begin());
    std::string where = "in front of everything";
    for (const Region& region : regions_) {
      if (region.arena == arena && region.offset <= at) {
        where = join("byte ", at - region.offset, " from the start of ", region.name);
      }
    }
    std::size_t wrong_bytes = 0;
    for (std::size_t i = 0; i < arena->used; ++i) {
      wrong_bytes += arena->data[i] != arena->expected[i] ? 1 : 0;
    }
    return join(arena == &heap_ ? "heap: " : "ordinary memory: ", wrong_bytes,
                " bytes are wrong, the first at ", where, ": expected ",
                std::to_integer<int>(*wrong.first), ", found ",
                std::to_integer<int>(*wrong.second));
  }
  return {};
}

}  // namespace pydist::testing
