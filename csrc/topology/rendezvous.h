// Meeting over a key-value store: every rank says something, and hears what rank 0 makes of what
// all have said.

#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "topology/key_value_store.h"

namespace pydist {

// Called now and then by whoever waits; throws where it knows that the wait is in vain.
using CheckHope = std::function<void()>;
// The same with the rank that is waited for.
using CheckHopeOf = std::function<void(int)>;
// What all throw who have waited for these ranks until the deadline.
using LatenessOf = std::function<ErrorDescription(const std::vector<int>&)>;
// What rank 0 makes of what all ranks have said, by rank. What it throws, all throw.
using Summarize = std::function<std::string(const std::vector<std::string>&)>;

// How much longer than rank 0 the others wait, so that they hear from it who was missing.
inline constexpr std::chrono::seconds kGraceAfterRankZero{10};

// What the store has under `key`, once it is there. Throws Timeout where that is not before the
// deadline, and what `check_hope` throws, unless the key is there by then.
[[nodiscard]] std::string get_while_hoping(KeyValueStore& store, const std::string& key,
                                           Deadline deadline, const CheckHope& check_hope);

// Returns the summary of what all ranks said, which rank 0 makes. Collective; `topic` is fresh each
// time and the same on every rank. Rank 0 gathers and hands out, so the store sees O(size)
// requests, not O(size^2); every rank reads the summary, so a short one keeps the bytes few.
//
// When ranks are missing at the deadline, every rank that came throws a Timeout that names them:
// what `lateness` says, where it is given. What ends the wait of one rank otherwise, all throw: see
// why_given_up().
[[nodiscard]] std::string exchange(KeyValueStore& store, const std::string& topic, int rank,
                                   int size, const std::string& mine, const Summarize& summarize,
                                   Deadline deadline, const CheckHopeOf& check_hope = nullptr,
                                   const LatenessOf& lateness = nullptr);

// For a rank that will not take part in an exchange(): nobody waits for it. Returns what all others
// throw: this, or what another rank has said before.
ErrorDescription decline(KeyValueStore& store, const std::string& topic, ErrorDescription why);
// Why an exchange() will not be, as a rank has told; nothing while none has.
[[nodiscard]] std::optional<ErrorDescription> declined(KeyValueStore& store,
                                                       const std::string& topic);

// For the handler of what has ended a rank's wait for others: what these are to throw. An exception
// that is none of the engine's is an interruption by the user, which they learn as Aborted. `self`
// is who they know this rank as.
[[nodiscard]] ErrorDescription why_given_up(Blame self);

// For the same handler: throws what the others do, as decline() returns it, so that nobody takes
// for the reason that a rank has left, which had read the reason before. An interruption stays what
// it is.
[[noreturn]] void throw_told(const ErrorDescription& told);

[[noreturn]] void throw_described(const ErrorDescription& error);

// A list of texts as one text, and back.
[[nodiscard]] std::string pack(const std::vector<std::string>& parts);
[[nodiscard]] std::vector<std::string> unpack(const std::string& text);

}  // namespace pydist
