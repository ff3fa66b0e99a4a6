// How the ranks on several hosts tell each other that they have posted.
//
//   directly    Each rank sends its post to each other host.
//   in rounds   Posts are passed on from host to host (topology/rounds.h): log2(h) messages of each
//               rank instead of h - 1, each of which takes the system some microseconds; but as
//               many delays one after the other.
//
// Where hosts have several ranks, these share the work: of each host, rank i of those that all
// hosts have passes on the posts of its host's ranks i, i + l, i + 2l ... where l is the number of
// ranks of the smallest host.
//
// In rounds nobody waits for a post, which may come by way of ranks that are late, but for who
// passes it on: a rank that drives the rounds of its host for the one that sends to it, all others
// for the ranks of their host that drive. Who waits shows for whom, so the one that keeps all
// waiting is found as in a ring (Note [Who keeps all waiting]). And a rank that has posted may end:
// its departure, which goes to each host directly, cannot overtake what anybody waits for.

#pragma once

#include <cstddef>
#include <span>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "topology/placement.h"

namespace pydist {

// Data that travels with the posts from round to round, where each host has one rank.
class Rider {
 public:
  Rider() = default;
  Rider(const Rider&) = delete;
  Rider& operator=(const Rider&) = delete;
  virtual ~Rider() = default;

  // What goes with the posts of a round, until the next call.
  [[nodiscard]] virtual std::span<const std::byte> message(int round) = 0;
  // What has come in the round is in the sender's transit slot. The sender has called the same.
  virtual void take(int round) = 0;
};

// Publishes this rank's post in rounds, and `eager_bytes` of its transit slot. At the end all have
// posted. `rider`: null where none goes along. Precondition: the post is filled in. Throws Mismatch
// where a rank that should pass posts on has called something else.
//
// Note [Who does not pass on]: whether a call is announced in rounds depends on what it is, so of
// ranks whose calls differ some may announce in rounds and others directly. Those pass nothing on,
// and who counts on one of them would wait for ever. But it hears that one itself, which has told
// all. So a rank compares the call of each that it hears with its own before it goes on, and throws
// Mismatch. Some rank always does: follow whom each waits for. Each is in an earlier round than the
// one before it, so that ends at one that does not announce in rounds, which the last one that
// waits hears.
[[nodiscard]] Task announce_in_rounds(Group& group, const Call& call, const Placement& placement,
                                      std::size_t eager_bytes, Rider* rider);

}  // namespace pydist
