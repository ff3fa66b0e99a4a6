#include "collectives/between_hosts/blocks_by_hosts.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "collectives/between_hosts/host_sums.h"
#include "collectives/between_hosts/segments.h"

namespace pydist {
namespace {

// Which blocks each rank of this host speaks for, and in which step.
//
// Note [Steps of blocks]
// In one step a rank does something about one segment of one block that it speaks for. A turn has
// as many steps as the rank that speaks for the most blocks, on any host, has blocks: so a segment
// has its turn on all hosts alike, and what passes between two ranks of a host is taken one step
// later, what crosses as many turns later as the channels have window. So a channel never holds
// more than Note [Segments ahead] counts, and no rank waits in a circle.
class Turns {
 public:
  Turns(const Placement& placement, int me)
      : placement_(placement), ranks_(placement.ranks_on(placement.host_of(me))) {
    for (const int rank : ranks_) {
      blocks_.push_back(blocks_of(rank));
    }
    for (int host = 0; host < placement.hosts(); ++host) {
      for (const int rank : placement.ranks_on(host)) {
        steps_ = std::max(steps_, blocks_of(rank).size());
      }
    }
  }

  // Ranks of this host.
  [[nodiscard]] std::span<const int> ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::size_t steps_of_a_turn() const noexcept { return steps_; }
  [[nodiscard]] std::size_t turn(std::size_t step) const noexcept { return step / steps_; }
  // Whose block the `index`-th rank of this host speaks for in this step; -1: nobody's.
  [[nodiscard]] int block_of(std::size_t index, std::size_t step) const noexcept {
    const std::vector<int>& its = blocks_[index];
    return step % steps_ < its.size() ? its[step % steps_] : -1;
  }

 private:
  [[nodiscard]] std::vector<int> blocks_of(int rank) const {
    std::vector<int> blocks;
    for (int other = 0; other < placement_.size(); ++other) {
      if (placement_.counterpart(other, placement_.host_of(rank)) == rank) {
        blocks.push_back(other);
      }
    }
    return blocks;
  }

  const Placement& placement_;
  const std::span<const int> ranks_;
  std::vector<std::vector<int>> blocks_;  // by index on this host
  std::size_t steps_ = 1;
};

// What one rank knows of the call and its place in it.
struct Speakers {
  Speakers(Collective& the_run, Channels& the_channels, const Placement& the_placement)
      : run(the_run),
        channels(the_channels),
        placement(the_placement),
        turns(the_placement, the_run.me()),
        host(the_placement.host_of(the_run.me())),
        mine(static_cast<std::size_t>(the_placement.index_on_host(the_run.me()))),
        cut(the_channels.slot_bytes(), the_run.element_bytes()) {}

  [[nodiscard]] Block segment(const Block& block, std::size_t turn) const {
    return cut.part_of(block, turn, run.element_bytes());
  }
  template <typename BlockOf>
  [[nodiscard]] std::size_t turns_for(const BlockOf& block_of) const {
    return cut.parts_in(largest_of(run.size(), block_of));
  }
  // The ranks of other hosts that speak for this rank's block, or about whose blocks it speaks.
  [[nodiscard]] int counterpart_on(int other_host) const {
    return placement.counterpart(run.me(), other_host);
  }

  Collective& run;
  Channels& channels;
  const Placement& placement;
  const Turns turns;
  const int host;
  const std::size_t mine;  // this rank's index among those of its host
  const Cut cut;
};

// -- reducing -------------------------------------------------------------------------------------

struct ReducingSpeakers : Speakers {
  ReducingSpeakers(Collective& the_run, Channels& the_channels, const Placement& the_placement)
      : Speakers(the_run, the_channels, the_placement),
        host_sums(the_run, the_placement),
        own_sums(the_channels.window() + 2) {
    for (std::vector<std::byte>& sum : own_sums) {
      sum.resize(run.slot_bytes(std::min(cut.longest(), input(run.me()).count)));
    }
  }

  // This rank's part of the block of `rank`.
  [[nodiscard]] Block input(int rank) const { return contribution(run.call(), rank); }
  // This host's for the block of this rank.
  [[nodiscard]] std::byte* own_sum(std::size_t turn) {
    return own_sums[turn % own_sums.size()].data();
  }

  HostSums host_sums;
  std::vector<std::vector<std::byte>> own_sums;
};

Task give_to_speakers(ReducingSpeakers& speakers, std::size_t step) {
  const std::span<const int> ranks = speakers.turns.ranks();
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    const int block = speakers.turns.block_of(index, step);
    if (index == speakers.mine || block < 0) {
      continue;
    }
    const Block part = speakers.segment(speakers.input(block), speakers.turns.turn(step));
    if (part.count != 0) {
      SendChannel& channel = speakers.channels.to(ranks[index]);
      co_await channel.until_free();
      const std::size_t bytes = speakers.run.bytes(part.count);
      std::memcpy(channel.slot(), part.data, bytes);
      channel.send(bytes);
    }
  }
}

Task send_sum_of_host(ReducingSpeakers& speakers, std::size_t step) {
  const Collective& run = speakers.run;
  const int block = speakers.turns.block_of(speakers.mine, step);
  const Block own =
      block < 0 ? Block{} : speakers.segment(speakers.input(block), speakers.turns.turn(step));
  if (own.count == 0) {
    co_return;
  }
  std::vector<const void*> pieces;
  for (const int rank : speakers.turns.ranks()) {
    if (rank == run.me()) {
      pieces.push_back(own.data);
    } else {
      co_await speakers.channels.from(rank).until_received();
      pieces.push_back(received(speakers.channels.from(rank), run.bytes(own.count)));
    }
  }
  if (block == run.me()) {
    speakers.host_sums.combine_ranks(pieces, speakers.own_sum(speakers.turns.turn(step)),
                                     own.count);
  } else {
    SendChannel& channel = speakers.channels.to(block);
    co_await channel.until_free();
    speakers.host_sums.combine_ranks(pieces, channel.slot(), own.count);
    channel.send(run.slot_bytes(own.count));
  }
  for (const int rank : speakers.turns.ranks()) {
    if (rank != run.me()) {
      speakers.channels.from(rank).release();
    }
  }
}

Task combine_own_block(ReducingSpeakers& speakers, std::size_t turn) {
  const Collective& run = speakers.run;
  const Block own = speakers.segment(speakers.input(run.me()), turn);
  if (own.count == 0) {
    co_return;
  }
  std::vector<const void*> sums;
  for (int host = 0; host < speakers.placement.hosts(); ++host) {
    if (host == speakers.host) {
      sums.push_back(speakers.own_sum(turn));
    } else {
      ReceiveChannel& channel = speakers.channels.from(speakers.counterpart_on(host));
      co_await channel.until_received();
      sums.push_back(received(channel, run.slot_bytes(own.count)));
    }
  }
  const Block result = speakers.segment(run.call().outputs[0], turn);
  speakers.host_sums.combine_hosts(sums, speakers.own_sum(turn), result.data, result.count);
  for (int host = 0; host < speakers.placement.hosts(); ++host) {
    if (host != speakers.host) {
      speakers.channels.from(speakers.counterpart_on(host)).release();
    }
  }
}

// -- spreading ------------------------------------------------------------------------------------

struct SpreadingSpeakers : Speakers {
  using Speakers::Speakers;

  // Where the block of `rank` lies on this rank.
  [[nodiscard]] Block block(int rank) const {
    const Call& call = run.call();
    if (call.kind == OpKind::kAllGather) {
      return rank == run.me() ? call.inputs[0] : call.outputs[rank];
    }
    if (rank != call.root) {
      return {};
    }
    return run.is_root() ? call.inputs[0] : call.outputs[0];
  }
  // The segment that the `index`-th rank of this host sends to it in this step.
  [[nodiscard]] Block passed_on(std::size_t index, std::size_t step) const {
    const int its = turns.block_of(index, step);
    return its < 0 ? Block{} : segment(block(its), turns.turn(step));
  }
};

Task send_own_block(SpreadingSpeakers& speakers, std::size_t step) {
  const Collective& run = speakers.run;
  if (speakers.turns.block_of(speakers.mine, step) != run.me()) {
    co_return;
  }
  const Block own = speakers.passed_on(speakers.mine, step);
  for (int host = 0; host < speakers.placement.hosts() && own.count != 0; ++host) {
    if (host != speakers.host) {
      SendChannel& channel = speakers.channels.to(speakers.counterpart_on(host));
      co_await channel.until_free();
      channel.send_from(own.data, run.bytes(own.count));
    }
  }
}

Task pass_on(SpreadingSpeakers& speakers, std::size_t step) {
  const Collective& run = speakers.run;
  const Block part = speakers.passed_on(speakers.mine, step);
  if (part.count == 0) {
    co_return;
  }
  const std::size_t bytes = run.bytes(part.count);
  if (const int block = speakers.turns.block_of(speakers.mine, step); block != run.me()) {
    ReceiveChannel& channel = speakers.channels.from(block);
    co_await channel.until_received();
    run.copy(part.data, received(channel, bytes), part.count);
    channel.release();
  }
  for (const int rank : speakers.turns.ranks()) {
    if (rank != run.me()) {
      SendChannel& channel = speakers.channels.to(rank);
      co_await channel.until_free();
      std::memcpy(channel.slot(), part.data, bytes);
      channel.send(bytes);
    }
  }
}

Task take_from_speakers(SpreadingSpeakers& speakers, std::size_t step) {
  const std::span<const int> ranks = speakers.turns.ranks();
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    const Block part = speakers.passed_on(index, step);
    if (index != speakers.mine && part.count != 0) {
      ReceiveChannel& channel = speakers.channels.from(ranks[index]);
      co_await channel.until_received();
      speakers.run.copy(part.data, received(channel, speakers.run.bytes(part.count)), part.count);
      channel.release();
    }
  }
}

[[nodiscard]] constexpr bool is_due(std::size_t step, std::size_t begins, std::size_t steps) {
  return step >= begins && step - begins < steps;
}

}  // namespace

Task reduce_blocks_by_hosts(Collective& run, Channels& channels, const Placement& placement) {
  ReducingSpeakers speakers(run, channels, placement);
  const std::size_t turn = speakers.turns.steps_of_a_turn();
  const std::size_t steps =
      speakers.turns_for([&](int rank) { return speakers.input(rank); }) * turn;
  const std::size_t combined_at = turn + channels.window() * turn;
  for (std::size_t step = 0; step < steps + combined_at; ++step) {
    if (is_due(step, 0, steps)) {
      co_await give_to_speakers(speakers, step);
    }
    if (is_due(step, 1, steps)) {
      co_await send_sum_of_host(speakers, step - 1);
    }
    if (step % turn == 0 && is_due(step, combined_at, steps)) {
      co_await combine_own_block(speakers, speakers.turns.turn(step - combined_at));
    }
  }
}

Task spread_blocks_by_hosts(Collective& run, Channels& channels, const Placement& placement) {
  SpreadingSpeakers speakers(run, channels, placement);
  if (const Call& call = run.call(); call.kind == OpKind::kAllGather) {
    run.copy(call.outputs[run.me()].data, call.inputs[0].data, call.inputs[0].count);
  } else if (run.is_root() && !call.outputs.empty()) {
    run.copy(call.outputs[0].data, call.inputs[0].data, call.inputs[0].count);
  }
  for (std::size_t step = 0; step < speakers.turns.steps_of_a_turn(); ++step) {
    const int block = speakers.turns.block_of(speakers.mine, step);
    if (block >= 0 && block != run.me()) {
      expect_segments(channels.from(block), speakers.block(block), speakers.cut,
                      run.element_bytes());
    }
  }
  const std::size_t turn = speakers.turns.steps_of_a_turn();
  const std::size_t steps =
      speakers.turns_for([&](int rank) { return speakers.block(rank); }) * turn;
  const std::size_t passed_at = turn - 1 + channels.window() * turn;
  const std::size_t taken_at = passed_at + 1;
  for (std::size_t step = 0; step < steps + taken_at; ++step) {
    if (is_due(step, 0, steps)) {
      co_await send_own_block(speakers, step);
    }
    if (is_due(step, passed_at, steps)) {
      co_await pass_on(speakers, step - passed_at);
    }
    if (is_due(step, taken_at, steps)) {
      co_await take_from_speakers(speakers, step - taken_at);
    }
  }
  // The own block has been sent from where it lies.
  for (int host = 0; host < placement.hosts(); ++host) {
    if (host != speakers.host) {
      co_await channels.to(speakers.counterpart_on(host)).until_written();
    }
  }
}

}  // namespace pydist
