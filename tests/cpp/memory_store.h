// A key-value store in memory, for ranks that are threads.
//
// Thread safe. It holds its users to the contract: a key is written once.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "topology/key_value_store.h"

namespace pydist::testing {

class MemoryStore final : public KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    ++requests_;
    if (!values_.emplace(key, value).second) {
      throw InvalidUsage("the key '" + key + "' was written before");
    }
    written_.notify_all();
  }

  [[nodiscard]] std::string settle(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    ++requests_;
    const std::string settled = values_.emplace(key, value).first->second;
    written_.notify_all();
    return settled;
  }

  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    ++requests_;
    const auto is_there = [&] { return values_.count(key) != 0; };
    if (deadline.is_never()) {
      written_.wait(lock, is_there);
    } else if (!written_.wait_until(lock, deadline.when(), is_there)) {
      throw Timeout("the key '" + key + "' was not written in time");
    }
    return values_.at(key);
  }

  void erase(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    ++requests_;
    values_.erase(key);
  }

  // How often anybody has asked for anything.
  [[nodiscard]] std::size_t requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

  // Keys that are left.
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable written_;
  std::map<std::string, std::string> values_;  // guarded by mutex_
  std::size_t requests_ = 0;                   // guarded by mutex_
};

}  // namespace pydist::testing
