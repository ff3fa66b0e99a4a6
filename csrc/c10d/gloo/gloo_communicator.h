// torch's own gloo as a backend behind the seam: any number of hosts, over TCP.
//
// Collectives of a group run one after another, on a thread of the group's. Point-to-point
// operations each wait on a thread of their own until their message has come.
//
// Ranks that disagree about a collective get a Mismatch before any data moves: they compare what
// they have called over connections of our own (gloo_control.h), and over gloo itself where there
// can be none (communicator/gathered_call_mismatch.h).

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>

#include "c10d/gloo/gloo_control.h"
#include "communicator/communicator.h"
#include "health/known_processes.h"
#include "health/long_wait.h"
#include "topology/rendezvous.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace pydist {

// Makes a ProcessGroupGloo whose ranks meet at the store. torch exports no header for it, so it
// comes from Python. Throws this project's errors. Called without the GIL.
using GlooFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)>;

// Joins a group of `size` ranks as `rank`. Collective over the group. `name` is unique among the
// groups that share the store, and the same on every rank. `check_hope` is called now and then
// while the ranks meet, and throws where somebody will never come. `long_wait` and `processes`: as
// in NativeOptions. `place`: where other ranks reach this one beside gloo.
[[nodiscard]] CommunicatorPtr create_gloo_communicator(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
    std::chrono::milliseconds timeout, GlooFactory factory, CheckHope check_hope = nullptr,
    std::chrono::milliseconds long_wait = kLongWait, KnownProcesses processes = {},
    GlooNode::Place place = {});

}  // namespace pydist
