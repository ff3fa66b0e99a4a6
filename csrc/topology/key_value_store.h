// The seam to whatever key-value store the ranks of a job share: torch's TCPStore, FileStore and
// HashStore (c10d/store), or a map in memory where ranks are threads.
//
// Thread safe. A key is written once and never changes.

#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/error.h"

namespace pydist {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Writes a key that several may want to write, unless it is there; returns what is there. `value`
  // is not empty.
  [[nodiscard]] virtual std::string settle(const std::string& key, const std::string& value) = 0;

  // Waits for the key to appear. Throws Timeout when the deadline passes first.
  [[nodiscard]] virtual std::string get(const std::string& key, Deadline deadline) = 0;
  // The same for a caller that has waited for the key since `since`, in other calls: a store that
  // has to be asked again and again is asked the more seldom, the longer that is.
  [[nodiscard]] virtual std::string go_on_waiting(const std::string& key, Deadline deadline,
                                                  Deadline::Clock::time_point /*since*/) {
    return get(key, deadline);
  }

  // Forgets the key, where the store can. Only for keys that nobody will ask for again.
  virtual void erase(const std::string& key) = 0;
};

using StorePtr = std::shared_ptr<KeyValueStore>;

// What is under the key now; nothing where it is not there. Throws where the store does not answer.
[[nodiscard]] inline std::optional<std::string> look_up(KeyValueStore& store,
                                                        const std::string& key) {
  try {
    return store.get(key, Deadline::in(std::chrono::nanoseconds::zero()));
  } catch (const Timeout&) {
    return std::nullopt;
  }
}

}  // namespace pydist
