#include "c10d/store.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/interruption.h"

namespace pydist {
namespace {

// A store's own wait would keep other threads from a client of a TCPStore, which serves one call
// at a time, and that one logs a warning whenever a wait runs out. So keys are asked for again and
// again, ever more slowly.
constexpr std::chrono::microseconds kFirstPause{200};
constexpr std::chrono::microseconds kLongestPause{10'000};

class TorchStore : public KeyValueStore {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {
    if (!store_) {
      throw InvalidUsage("A group needs a store for its ranks to meet at, and got None.");
    }
  }

  void set(const std::string& key, const std::string& value) override {
    attempt("write", key, [&] { store_->set(key, bytes_of(value)); });
  }

  std::string get(const std::string& key, Deadline deadline) override {
    auto pause = kFirstPause;
    for (;;) {
      bool is_there = false;
      attempt("read", key, [&] { is_there = store_->check({key}); });
      if (is_there) {
        break;
      }
      if (deadline.has_passed()) {
        throw Timeout(join("The key '", key,
                           "' did not appear in the store in time: the rank that "
                           "writes it has not come this far."));
      }
      check_interruption();
      std::this_thread::sleep_for(deadline.remaining(pause));
      pause = std::min(pause * 2, kLongestPause);
    }
    std::vector<std::uint8_t> value;
    attempt("read", key, [&] { value = store_->get(key); });
    return {value.begin(), value.end()};
  }

  void erase(const std::string& key) override {
    try {
      store_->deleteKey(key);
    } catch (const std::exception&) {
      // Not every store can forget, and a store that is gone has forgotten.
    }
  }

 private:
  static std::vector<std::uint8_t> bytes_of(const std::string& text) {
    return {text.begin(), text.end()};
  }

  static TransportError unreachable(const char* verb, const std::string& key, const char* what) {
    const std::string text(what);
    return TransportError(join("Could not ", verb, " the key '", key,
                               "' in the job's store; is the rank that hosts it still alive? ",
                               text.substr(0, text.find('\n'))));
  }

  template <typename Function>
  static void attempt(const char* verb, const std::string& key, const Function& function) {
    try {
      function();
    } catch (const std::exception& error) {
      throw unreachable(verb, key, error.what());
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

StorePtr adapt_store(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_shared<TorchStore>(std::move(store));
}

}  // namespace pydist
