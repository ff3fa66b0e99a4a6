#include "collectives/between_hosts/exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "collectives/between_hosts/segments.h"
#include "collectives/slices.h"

namespace pydist {
namespace {

// The other ranks, each rank's next one first, so that not all send to one at a time.
std::vector<int> others_of(const Collective& run) {
  std::vector<int> others;
  for (int turn = 1; turn < run.size(); ++turn) {
    others.push_back((run.me() + turn) % run.size());
  }
  return others;
}

// What every rank contributes to, and who reduces it.
class ReducedBlocks {
 public:
  explicit ReducedBlocks(const Collective& run)
      : run_(run),
        call_(run.call()),
        slices_(call_.kind == OpKind::kAllReduce ? call_.count : 0, run.size(),
                run.slot_element_bytes()) {}

  // This rank's contribution to what `rank` reduces.
  [[nodiscard]] Block input(int rank) const {
    return call_.kind == OpKind::kAllReduce ? slice(call_.inputs[0].data, rank)
                                            : contribution(call_, rank);
  }
  // Where the result of what `rank` reduces belongs here; nowhere where this rank doesn't get it.
  [[nodiscard]] Block output(int rank) const {
    if (call_.kind == OpKind::kAllReduce) {
      return slice(call_.outputs[0].data, rank);
    }
    return rank == run_.me() && !call_.outputs.empty() && input(rank).count != 0 ? call_.outputs[0]
                                                                                 : Block{};
  }
  [[nodiscard]] bool gathers() const { return call_.kind == OpKind::kAllReduce; }

  // Elements of the largest.
  [[nodiscard]] std::size_t largest() const {
    return largest_of(run_.size(), [this](int rank) { return input(rank); });
  }

 private:
  [[nodiscard]] Block slice(std::byte* whole, int rank) const {
    const Slice its = slices_[rank];
    return {whole + run_.bytes(its.begin), its.count};
  }

  const Collective& run_;
  const Call& call_;
  const Slices slices_;
};

// Sends elements of a buffer, which stay as they are until the channel has written them.
void send_elements(const Collective& run, SendChannel& channel, const Block& elements) {
  if (run.wire().converts()) {
    run.put(channel.slot(), elements.data, elements.count);
    channel.send(run.slot_bytes(elements.count));
  } else {
    channel.send_from(elements.data, run.slot_bytes(elements.count));
  }
}

}  // namespace

// Note [Segments ahead]
// Contributions are sent `ahead` segments before they are reduced here, and results are taken as
// many segments after they could have been sent by their owner: so in every step there is something
// to do while the rest is on its way. Segments of contributions and of results alternate in a
// channel, in the same order at both ends. A rank waits for a free slot only when it has released
// what it has taken, so at most 2 * ahead + 1 of them are in a channel and not yet released. It has
// slots for these, and for those that are released and not told of yet: so the rank that has come
// least far never waits for a free slot, and what it waits for has been sent.
Task exchange_and_reduce(Collective& run, Channels& channels) {
  const ReducedBlocks blocks(run);
  const std::vector<int> others = others_of(run);
  const int me = run.me();
  const std::size_t ahead = channels.window();
  const Cut cut(channels.slot_bytes(), run.slot_element_bytes());
  const std::size_t segments = cut.parts_in(blocks.largest());
  const auto segment = [&](const Block& block, std::size_t index) {
    return cut.part_of(block, index, run.element_bytes());
  };
  std::vector<const std::byte*> pieces(static_cast<std::size_t>(run.size()));
  // A result that travels in another type, to which it is rounded here, too. Not in a free slot:
  // who waits for one has to have released what the others have sent.
  std::vector<std::byte> travelling(
      blocks.gathers() && run.wire().converts()
          ? run.slot_bytes(std::min(cut.longest(), blocks.input(me).count))
          : 0);

  const bool expects_results = blocks.gathers() && !run.wire().converts();
  std::vector<ResultNumbers> results;  // by rank
  for (int rank = 0; rank < run.size() && expects_results; ++rank) {
    results.emplace_back(channels.from(rank), cut.parts_in(blocks.input(me).count), ahead);
  }
  for (std::size_t step = 0; step < segments + 2 * ahead; ++step) {
    for (const int rank : others) {
      if (const Block part = segment(blocks.input(rank), step); part.count != 0) {
        co_await channels.to(rank).until_free();
        send_elements(run, channels.to(rank), part);
        if (expects_results) {
          // The result, which may belong in the same place, comes only once the part is there.
          channels.from(rank).expect(
              results[static_cast<std::size_t>(rank)].of(step),
              {segment(blocks.output(rank), step).data, run.bytes(part.count)});
        }
      }
    }
    if (step < ahead) {
      continue;
    }
    const Block own = segment(blocks.input(me), step - ahead);
    if (own.count != 0) {
      for (const int rank : others) {
        co_await channels.from(rank).until_received();
        pieces[static_cast<std::size_t>(rank)] =
            received(channels.from(rank), run.slot_bytes(own.count));
      }
      const Block result = segment(blocks.output(me), step - ahead);
      run.reduce_pieces(
          [&](int rank) { return rank == me ? own.data : pieces[static_cast<std::size_t>(rank)]; },
          travelling.empty() ? nullptr : travelling.data(), result.data, own.count);
      for (const int rank : others) {
        channels.from(rank).release();
      }
      for (const int rank : others) {
        if (!blocks.gathers()) {
          break;
        }
        SendChannel& channel = channels.to(rank);
        co_await channel.until_free();
        if (travelling.empty()) {
          channel.send_from(result.data, run.slot_bytes(own.count));
        } else {
          std::memcpy(channel.slot(), travelling.data(), run.slot_bytes(own.count));
          channel.send(run.slot_bytes(own.count));
        }
      }
    }
    for (const int rank : others) {
      if (step < 2 * ahead || !blocks.gathers()) {
        break;
      }
      const Block part = segment(blocks.output(rank), step - 2 * ahead);
      if (part.count != 0) {
        ReceiveChannel& channel = channels.from(rank);
        co_await channel.until_received();
        run.take(part.data, received(channel, run.slot_bytes(part.count)), part.count);
        channel.release();
      }
    }
  }
  for (const int rank : others) {
    co_await channels.to(rank).until_written();
  }
}

Task exchange_blocks(Collective& run, Channels& channels) {
  const Call& call = run.call();
  const int me = run.me();
  const auto sent_to = [&call, me](int rank) -> Block {
    switch (call.kind) {
      case OpKind::kAllGather:
        return call.inputs[0];
      case OpKind::kBroadcast:
        return me == call.root ? call.inputs[0] : Block{};
      default:
        return call.sent_to(rank);
    }
  };
  const auto received_from = [&call, me](int rank) -> Block {
    switch (call.kind) {
      case OpKind::kAllGather:
        return call.outputs[rank];
      case OpKind::kBroadcast:
        return rank == call.root && !call.outputs.empty() ? call.outputs[0] : Block{};
      default:
        return call.received_from(rank);
    }
  };
  const Cut cut(channels.slot_bytes(), run.slot_element_bytes());
  const std::vector<int> others = others_of(run);
  std::size_t segments = 0;
  for (const int rank : others) {
    segments = std::max(
        {segments, cut.parts_in(sent_to(rank).count), cut.parts_in(received_from(rank).count)});
  }
  const std::size_t ahead = channels.window();
  const auto segment = [&](const Block& block, std::size_t index) {
    return cut.part_of(block, index, run.element_bytes());
  };

  // In all_to_all, what comes from a rank may take the place of what goes to it.
  const auto is_in_place = [&](int rank) {
    const Block in = received_from(rank);
    return in.count != 0 && in.data == sent_to(rank).data;
  };
  for (const int rank : others) {
    if (!is_in_place(rank)) {
      expect_segments(channels.from(rank), received_from(rank), cut, run.element_bytes());
    }
  }
  if (const Block own = received_from(me); own.count != 0) {
    run.copy(own.data, sent_to(me).data, own.count);
  }
  for (std::size_t step = 0; step < segments + ahead; ++step) {
    for (const int rank : others) {
      if (const Block part = segment(sent_to(rank), step); part.count != 0) {
        co_await channels.to(rank).until_free();
        channels.to(rank).send_from(part.data, run.bytes(part.count));
      }
    }
    for (const int rank : others) {
      if (step < ahead) {
        break;
      }
      const Block part = segment(received_from(rank), step - ahead);
      if (part.count != 0) {
        ReceiveChannel& channel = channels.from(rank);
        co_await channel.until_received();
        if (is_in_place(rank)) {
          co_await channels.to(rank).until_written();
        }
        run.copy(part.data, received(channel, run.bytes(part.count)), part.count);
        channel.release();
      }
    }
  }
  for (const int rank : others) {
    if (sent_to(rank).count != 0) {
      co_await channels.to(rank).until_written();
    }
  }
}

}  // namespace pydist
