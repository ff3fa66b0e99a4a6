#include "collectives/between_hosts/by_hosts.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "collectives/between_hosts/host_sums.h"
#include "collectives/between_hosts/segments.h"
#include "collectives/call_mismatch.h"
#include "collectives/heap_access.h"
#include "collectives/slices.h"

namespace pydist {
namespace {

// How many steps a station inside a host comes after the one before: what passes between ranks of a
// host is there at once.
constexpr std::size_t kAheadOnHost = 1;

// The longest part of a piece: between hosts one of them takes a slot, inside a host one for each
// host.
std::size_t part_bytes(const Channels& channels, const Placement& placement) noexcept {
  return std::min(channels.slot_bytes(),
                  channels.slot_bytes_on_host() / static_cast<std::size_t>(placement.hosts()));
}

// Where each lane's pieces lie.
class Pieces {
 public:
  Pieces(const Collective& run, const Placement& placement)
      : run_(run),
        hosts_(placement.hosts()),
        lanes_(placement.least_on_a_host()),
        whole_(run.call().count, lanes_, run.slot_element_bytes()) {}

  [[nodiscard]] int lanes() const noexcept { return lanes_; }
  [[nodiscard]] Block of(std::byte* buffer, int lane, int host) const {
    const Slice lane_slice = whole_[lane];
    const Slice piece = Slices(lane_slice.count, hosts_, run_.slot_element_bytes())[host];
    return {buffer + run_.bytes(lane_slice.begin + piece.begin), piece.count};
  }
  // Elements of the largest, which is the first.
  [[nodiscard]] std::size_t largest() const { return of(nullptr, 0, 0).count; }

 private:
  const Collective& run_;
  const int hosts_;
  const int lanes_;
  const Slices whole_;
};

// The buffers of a rank of this host, where this rank reaches them.
struct HeapBuffers {
  const std::byte* input;
  std::byte* output;
};

// Those of all ranks of this host, in their order, if all of them are in its symmetric heap.
std::vector<HeapBuffers> buffers_on_heap(const Collective& run, const Placement& placement) {
  const Group& group = run.group();
  const std::size_t bytes = run.bytes(run.call().count);
  std::vector<HeapBuffers> buffers;
  for (const int rank : placement.ranks_on(placement.host_of(run.me()))) {
    if (group.post(rank).offer() != Offer::kOnHostHeap) {
      return {};
    }
    const PostDetail& places = group.detail(rank);
    if (!group.heap().has(places.input, bytes) || !group.heap().has(places.output, bytes)) {
      throw_damaged(group, rank);
    }
    const int index = placement.index_on_host(rank);
    buffers.push_back(
        {group.heap().address(index, places.input), group.heap().address(index, places.output)});
  }
  return buffers;
}

// What one rank knows of the call and its place in it.
struct Lanes {
  Lanes(Collective& the_run, Channels& the_channels, const Placement& the_placement)
      : run(the_run),
        channels(the_channels),
        placement(the_placement),
        pieces(the_run, the_placement),
        host(the_placement.host_of(the_run.me())),
        mine(the_placement.index_on_host(the_run.me())),
        drives(mine < pieces.lanes()),
        cut(part_bytes(the_channels, the_placement), the_run.element_bytes()),
        host_sums(the_run, the_placement),
        own_sums(the_channels.window() + 1),
        input(the_run.call().inputs[0].data),
        output(the_run.call().outputs[0].data),
        heap(buffers_on_heap(the_run, the_placement)) {
    for (std::vector<std::byte>& sum : own_sums) {
      sum.resize(drives ? run.slot_bytes(cut.longest()) : 0);
    }
    for (int each = 0; drives && each < placement.hosts(); ++each) {
      results.emplace_back(channels.from(driver(each, mine)),
                           cut.parts_in(pieces.of(nullptr, mine, host).count), channels.window());
    }
  }

  [[nodiscard]] std::size_t steps() const { return cut.parts_in(pieces.largest()); }
  [[nodiscard]] Block part(std::byte* buffer, int lane, int its_host, std::size_t step) const {
    return cut.part_of(pieces.of(buffer, lane, its_host), step, run.element_bytes());
  }
  // Elements of all hosts' parts of a lane, which travel inside a host as one.
  [[nodiscard]] std::size_t bundle(int lane, std::size_t step) const {
    std::size_t count = 0;
    for (int each = 0; each < placement.hosts(); ++each) {
      count += part(output, lane, each, step).count;
    }
    return count;
  }
  [[nodiscard]] int driver(int its_host, int lane) const {
    return placement.ranks_on(its_host)[static_cast<std::size_t>(lane)];
  }
  // Puts the parts of a lane side by side into a slot.
  void put_bundle(std::byte* slot, std::byte* buffer, int lane, std::size_t step) const {
    for (int each = 0; each < placement.hosts(); ++each) {
      const Block from = part(buffer, lane, each, step);
      if (from.count != 0) {
        std::memcpy(slot, from.data, run.bytes(from.count));
        slot += run.bytes(from.count);
      }
    }
  }
  void take_bundle(const std::byte* slot, int lane, std::size_t step) const {
    for (int each = 0; each < placement.hosts(); ++each) {
      const Block to = part(output, lane, each, step);
      run.copy(to.data, slot, to.count);
      slot += run.bytes(to.count);
    }
  }
  [[nodiscard]] std::vector<std::byte>& own_sum(std::size_t step) {
    return own_sums[step % own_sums.size()];
  }

  // -- on the heap ----------------------------------------------------------------------------
  // Whether all ranks of this host have their buffers in its symmetric heap.
  [[nodiscard]] bool on_heap() const { return !heap.empty(); }
  // The first rank of this host that has left, or -1: Note [Leaving amid an operation].
  [[nodiscard]] int who_has_left() const {
    const std::span<const int> ranks = placement.ranks_on(host);
    const auto gone = std::find_if(ranks.begin(), ranks.end(),
                                   [this](int rank) { return has_left(run.group(), rank); });
    return gone == ranks.end() ? -1 : *gone;
  }
  // Has `write` put a part into the output of each rank of this host, unless one has left. Returns
  // that one, or -1.
  template <typename Write>
  [[nodiscard]] int write_to_all(const Block& part, const Write& write) const {
    const HeapWriting writing(run.group());
    const int left = who_has_left();
    if (left >= 0) {
      return left;
    }
    for (const HeapBuffers& each : heap) {
      write(each.output + (part.data - output));
    }
    return -1;
  }

  Collective& run;
  Channels& channels;
  const Placement& placement;
  const Pieces pieces;
  const int host;
  const int mine;     // this rank among those of its host
  const bool drives;  // lane `mine`
  const Cut cut;
  HostSums host_sums;
  std::vector<std::vector<std::byte>> own_sums;  // of this host for its own piece, by step
  std::byte* const input;
  std::byte* const output;
  const std::vector<HeapBuffers> heap;  // of the ranks of this host, in their order; or none
  std::vector<ResultNumbers> results;   // of who drives this lane, by host
};

// Station 1.
Task give_to_host(Lanes& lanes, std::size_t step) {
  for (int lane = 0; lane < lanes.pieces.lanes(); ++lane) {
    const int driver = lanes.driver(lanes.host, lane);
    if (driver == lanes.run.me() || lanes.bundle(lane, step) == 0) {
      continue;
    }
    SendChannel& channel = lanes.channels.to(driver);
    co_await channel.until_free();
    lanes.put_bundle(channel.slot(), lanes.input, lane, step);
    channel.send(lanes.run.bytes(lanes.bundle(lane, step)));
  }
}

// Station 2.
Task send_sums_of_host(Lanes& lanes, std::size_t step) {
  const Collective& run = lanes.run;
  const std::span<const int> ranks = lanes.placement.ranks_on(lanes.host);
  const std::size_t bytes = run.bytes(lanes.bundle(lanes.mine, step));
  if (bytes == 0) {
    co_return;
  }
  // What ranks have given, of all hosts' parts side by side; of those whose inputs are read where
  // they lie, null.
  std::vector<const std::byte*> bundles(ranks.size());
  for (std::size_t index = 0; index < ranks.size() && !lanes.on_heap(); ++index) {
    if (ranks[index] != run.me()) {
      ReceiveChannel& channel = lanes.channels.from(ranks[index]);
      co_await channel.until_received();
      bundles[index] = received(channel, bytes);
    }
  }
  std::size_t offset = 0;
  for (int host = 0; host < lanes.placement.hosts(); ++host) {
    const Block own = lanes.part(lanes.input, lanes.mine, host, step);
    if (own.count == 0) {
      continue;
    }
    SendChannel* channel = nullptr;
    std::byte* sum = lanes.own_sum(step).data();
    if (host != lanes.host) {
      channel = &lanes.channels.to(lanes.driver(host, lanes.mine));
      co_await channel->until_free();
      sum = channel->slot();
    }
    std::vector<const void*> sources(ranks.size());
    for (std::size_t index = 0; index < ranks.size(); ++index) {
      if (lanes.on_heap()) {
        sources[index] = lanes.heap[index].input + (own.data - lanes.input);
      } else {
        sources[index] = bundles[index] == nullptr ? own.data : bundles[index] + offset;
      }
    }
    lanes.host_sums.combine_ranks(sources, sum, own.count);
    if (lanes.on_heap()) {
      require_right_reads(run.group());
      if (const int left = lanes.who_has_left(); left >= 0) {
        co_await until_back(run.group(), left);
      }
    }
    if (channel != nullptr) {
      channel->send(run.slot_bytes(own.count));
      if (!run.wire().converts()) {
        lanes.channels.from(lanes.driver(host, lanes.mine))
            .expect(lanes.results[static_cast<std::size_t>(host)].of(step),
                    {lanes.part(lanes.output, lanes.mine, host, step).data, run.bytes(own.count)});
      }
    }
    offset += run.bytes(own.count);
  }
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    if (bundles[index] != nullptr) {
      lanes.channels.from(ranks[index]).release();
    }
  }
}

// Station 3.
Task send_results(Lanes& lanes, std::size_t step) {
  const Collective& run = lanes.run;
  const Block result = lanes.part(lanes.output, lanes.mine, lanes.host, step);
  if (result.count == 0) {
    co_return;
  }
  const std::size_t bytes = run.slot_bytes(result.count);
  std::vector<const void*> sums;
  for (int host = 0; host < lanes.placement.hosts(); ++host) {
    if (host == lanes.host) {
      sums.push_back(lanes.own_sum(step).data());
    } else {
      ReceiveChannel& channel = lanes.channels.from(lanes.driver(host, lanes.mine));
      co_await channel.until_received();
      sums.push_back(received(channel, bytes));
    }
  }
  lanes.host_sums.combine_hosts(sums, lanes.own_sum(step).data(), result.data, result.count);
  for (int host = 0; host < lanes.placement.hosts(); ++host) {
    if (host == lanes.host) {
      continue;
    }
    const int driver = lanes.driver(host, lanes.mine);
    lanes.channels.from(driver).release();
    SendChannel& channel = lanes.channels.to(driver);
    co_await channel.until_free();
    if (run.wire().converts()) {
      std::memcpy(channel.slot(), lanes.own_sum(step).data(), bytes);
      channel.send(bytes);
    } else {
      channel.send_from(result.data, bytes);
    }
  }
  if (lanes.on_heap()) {
    const int left = lanes.write_to_all(
        result, [&](std::byte* output) { run.copy(output, result.data, result.count); });
    if (left >= 0) {
      co_await until_back(run.group(), left);
    }
  }
}

// Station 4.
Task spread_on_host(Lanes& lanes, std::size_t step) {
  const Collective& run = lanes.run;
  for (int host = 0; host < lanes.placement.hosts(); ++host) {
    const Block result = lanes.part(lanes.output, lanes.mine, host, step);
    if (host != lanes.host && result.count != 0) {
      ReceiveChannel& channel = lanes.channels.from(lanes.driver(host, lanes.mine));
      co_await channel.until_received();
      const std::byte* travelled = received(channel, run.slot_bytes(result.count));
      const auto take = [&](std::byte* target) { run.take(target, travelled, result.count); };
      if (!lanes.on_heap()) {
        take(result.data);
      } else if (const int left = lanes.write_to_all(result, take); left >= 0) {
        co_await until_back(run.group(), left);
      }
      channel.release();
    }
  }
  if (lanes.on_heap()) {
    co_return;
  }
  const std::size_t bytes = run.bytes(lanes.bundle(lanes.mine, step));
  for (const int rank : lanes.placement.ranks_on(lanes.host)) {
    if (rank != run.me() && bytes != 0) {
      SendChannel& channel = lanes.channels.to(rank);
      co_await channel.until_free();
      lanes.put_bundle(channel.slot(), lanes.output, lanes.mine, step);
      channel.send(bytes);
    }
  }
}

// Station 5.
Task take_from_host(Lanes& lanes, std::size_t step) {
  for (int lane = 0; lane < lanes.pieces.lanes(); ++lane) {
    const int driver = lanes.driver(lanes.host, lane);
    const std::size_t bytes = lanes.run.bytes(lanes.bundle(lane, step));
    if (driver != lanes.run.me() && bytes != 0) {
      ReceiveChannel& channel = lanes.channels.from(driver);
      co_await channel.until_received();
      lanes.take_bundle(received(channel, bytes), lane, step);
      channel.release();
    }
  }
}

}  // namespace

bool fits_by_hosts(const Channels& channels, const Placement& placement) noexcept {
  constexpr std::size_t kLeastPart = 256;
  return part_bytes(channels, placement) >= kLeastPart;
}

bool has_hosts_of_several_ranks(const Placement& placement) noexcept {
  return placement.size() > placement.hosts();
}

// Segments of two kinds alternate in each channel, in the same order at both ends: between ranks of
// a host contributions and results, between hosts sums and results. What is under way and not yet
// taken is at most the steps between the two stations, twice, and one: fewer than a channel has
// slots. So no rank waits in a circle, see Note [Segments ahead].
Task all_reduce_by_hosts(Collective& run, Channels& channels, const Placement& placement) {
  Lanes lanes(run, channels, placement);
  const std::size_t steps = lanes.steps();
  const std::size_t ahead = channels.window();
  const std::size_t sums_at = kAheadOnHost;
  const std::size_t results_at = sums_at + ahead;
  const std::size_t spread_at = results_at + ahead;
  const std::size_t taken_at = spread_at + kAheadOnHost;
  const auto is_due = [steps](std::size_t step, std::size_t begins) {
    return step >= begins && step - begins < steps;
  };
  for (std::size_t step = 0; step < steps + taken_at; ++step) {
    if (!lanes.on_heap() && is_due(step, 0)) {
      co_await give_to_host(lanes, step);
    }
    if (lanes.drives && is_due(step, sums_at)) {
      co_await send_sums_of_host(lanes, step - sums_at);
    }
    if (lanes.drives && is_due(step, results_at)) {
      co_await send_results(lanes, step - results_at);
    }
    if (lanes.drives && is_due(step, spread_at)) {
      co_await spread_on_host(lanes, step - spread_at);
    }
    if (!lanes.on_heap() && is_due(step, taken_at)) {
      co_await take_from_host(lanes, step - taken_at);
    }
  }
  for (int host = 0; lanes.drives && host < placement.hosts(); ++host) {
    if (host != lanes.host) {
      co_await channels.to(lanes.driver(host, lanes.mine)).until_written();
    }
  }
  // Who drives a lane has read from all ranks of its host by the end, and written to all. It counts
  // as a round, also where another host alone has its buffers on the heap.
  Group& group = run.group();
  if (lanes.on_heap()) {
    group.publish(&RankControl::consumed, group.round());
    for (int lane = 0; lane < lanes.pieces.lanes(); ++lane) {
      co_await group.done_by(&RankControl::consumed, lanes.driver(lanes.host, lane), group.round());
    }
  }
  group.advance_rounds(1);
}

}  // namespace pydist
