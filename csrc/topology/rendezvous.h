// Meeting over a key-value store: every rank says something, every rank hears everybody.

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "topology/key_value_store.h"

namespace pydist {

// Returns what all ranks said, in rank order. Collective; `topic` is fresh each time and the same
// on every rank. Rank 0 gathers and hands out, so the store sees O(size) requests, not O(size^2).
//
// When ranks are missing at the deadline, every rank that came throws a Timeout that names them.
// `check_hope`, where given, is called now and then while waiting, and throws where it knows that
// somebody will never come.
using CheckHope = std::function<void()>;
[[nodiscard]] std::vector<std::string> exchange(KeyValueStore& store, const std::string& topic,
                                                int rank, int size, const std::string& mine,
                                                Deadline deadline,
                                                const CheckHope& check_hope = nullptr);

// Whether all ranks are content: exchange() of complaints. Returns the first complaint, by rank,
// as "rank 3: ..."; empty when there is none. Collective.
[[nodiscard]] std::string first_complaint(KeyValueStore& store, const std::string& topic, int rank,
                                          int size, const std::string& mine, Deadline deadline,
                                          const CheckHope& check_hope = nullptr);

// A list of texts as one text, and back.
[[nodiscard]] std::string pack(const std::vector<std::string>& parts);
[[nodiscard]] std::vector<std::string> unpack(const std::string& text);

}  // namespace pydist
