#include "collectives/between_hosts/in_rounds.h"

#include <cstring>

#include "collectives/call_mismatch.h"

namespace pydist {
namespace {

// Through which transit slots of the senders the contributions go, and the results.
constexpr std::uint64_t kContributions = 0;
constexpr std::uint64_t kResults = 1;
constexpr std::uint64_t kTransitRounds = 2;

// Half of the slices, the first of which is as long as any.
std::size_t most_message_bytes(const Collective& run, const Slices& slices) noexcept {
  return static_cast<std::size_t>(run.size() + 1) / 2 * run.slot_bytes(slices[0].count);
}

}  // namespace

bool goes_in_rounds(const Collective& run, std::size_t most_bytes) noexcept {
  const Call& call = run.call();
  const Slices slices(call.count, run.size(), run.slot_element_bytes());
  return call.kind == OpKind::kAllReduce && run.slot_bytes(call.count) <= most_bytes &&
         most_message_bytes(run, slices) <= run.group().chunk_bytes();
}

AllReduceInRounds::AllReduceInRounds(Collective& run)
    : run_(run),
      rounds_(run.me(), run.size()),
      slices_(run.call().count, run.size(), run.slot_element_bytes()),
      input_(run.call().inputs[0].data),
      output_(run.call().outputs[0].data),
      contributions_(static_cast<std::size_t>(run.size()), nullptr) {
  message_.reserve(most_message_bytes(run, slices_));
}

void AllReduceInRounds::append(const std::byte* own, const std::byte* travelled,
                               std::size_t count) {
  const std::size_t begin = message_.size();
  const std::size_t bytes = run_.slot_bytes(count);
  message_.resize(begin + bytes);
  if (travelled == nullptr) {
    run_.put(message_.data() + begin, own, count);
  } else if (bytes != 0) {
    std::memcpy(message_.data() + begin, travelled, bytes);
  }
}

std::span<const std::byte> AllReduceInRounds::message(int round) {
  message_.clear();
  for (int places = 1; places < rounds_.size(); ++places) {
    if (Rounds::moves(places, round)) {
      const int rank = owner(round, /*holder=*/0, places);
      append(of_slice(input_, rank), contributions_[static_cast<std::size_t>(places)], count(rank));
    }
  }
  return message_;
}

void AllReduceInRounds::take(int round) {
  const auto coming = [&](int places) {
    return run_.slot_bytes(count(owner(round, /*holder=*/1 << round, places)));
  };
  std::size_t bytes = 0;
  for (int places = 1; places < rounds_.size(); ++places) {
    bytes += Rounds::moves(places, round) ? coming(places) : 0;
  }
  const std::byte* got = arrived(rounds_.from(round), kContributions, bytes);
  for (int places = 1; places < rounds_.size(); ++places) {
    if (Rounds::moves(places, round)) {
      contributions_[static_cast<std::size_t>(places)] = got;
      got += coming(places);
    }
  }
}

const std::byte* AllReduceInRounds::arrived(int from, std::uint64_t transit_round,
                                            std::size_t bytes) const {
  static constexpr std::byte kNothing{};
  const Group& group = run_.group();
  const std::byte* const got =
      bytes == 0 ? &kNothing : group.arrived(from, group.round() + transit_round, bytes);
  if (got == nullptr) {
    throw_damaged(group, from);
  }
  return got;
}

Task AllReduceInRounds::finish() {
  const int me = run_.me();
  std::vector<std::byte> own_result(run_.wire().converts() ? run_.slot_bytes(count(me)) : 0);
  std::byte* const travelling = own_result.empty() ? nullptr : own_result.data();
  run_.reduce_pieces(
      [&](int rank) -> const std::byte* {
        const int places = rounds_.places_to(rank);
        return places == 0 ? of_slice(input_, me)
                           : contributions_[static_cast<std::size_t>(places)];
      },
      travelling, of_slice(output_, me), count(me));
  co_await spread_results(travelling);
  Group& group = run_.group();
  group.publish_quietly(&RankControl::consumed, group.round() + kTransitRounds - 1);
  group.advance_rounds(kTransitRounds);
}

// `own_result`: as it travels, where that is not as it lies in the output.
Task AllReduceInRounds::spread_results(const std::byte* own_result) {
  Group& group = run_.group();
  const std::uint64_t number = group.round() + kResults;
  // By places after this rank; null where it lies in the output as it travels.
  std::vector<const std::byte*> travelled(static_cast<std::size_t>(rounds_.size()), nullptr);
  travelled[0] = own_result;
  for (int round = 0; round < rounds_.count(); ++round) {
    message_.clear();
    for (int places = 0; places < rounds_.told(round); ++places) {
      const int rank = rounds_.after(places);
      append(of_slice(output_, rank), travelled[static_cast<std::size_t>(places)], count(rank));
    }
    group.announcer()->send_deposit(rounds_.to(round), number, message_);
    const int from = rounds_.from(round);
    co_await group.done_by(&RankControl::deposited, from, number);
    std::size_t bytes = 0;
    for (int places = 0; places < rounds_.told(round); ++places) {
      bytes += run_.slot_bytes(count(rounds_.after((1 << round) + places)));
    }
    const std::byte* got = arrived(from, kResults, bytes);
    for (int places = 1 << round; places < (1 << round) + rounds_.told(round); ++places) {
      const int rank = rounds_.after(places);
      run_.take(of_slice(output_, rank), got, count(rank));
      travelled[static_cast<std::size_t>(places)] = run_.wire().converts() ? got : nullptr;
      got += run_.slot_bytes(count(rank));
    }
  }
}

}  // namespace pydist
