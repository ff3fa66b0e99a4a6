#include "c10d/store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/interruption.h"
#include "c10d/elastic_threads.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

// Note [Asking again]
// Whoever waits for a key asks for it again and again, ever more slowly. A wait of the store's own
// would not do. A client of a TCPStore serves one call at a time, so the wait would keep all other
// threads from it; a clone of the client is one more connection for each rank, which takes a
// descriptor of the server's, and for which the server looks up a name (see poll_store()). And a
// wait has to end several times a second, to look for news and for Ctrl-C: a TCPStore logs two
// warnings each time.
constexpr std::chrono::microseconds kFirstPause{20};
constexpr std::chrono::microseconds kLongestPause{10'000};
// Up to some thousand ranks that wait together ask a server about 10,000 times a second; each of
// more of them does so at least at the end of every slice of its wait (get_while_hoping()).
constexpr std::chrono::microseconds kPauseForEachRank{100};
// Ranks that come at the same time ask together at first, too.
constexpr std::chrono::microseconds kFirstPauseForEachRank{5};
// How often a rank that waits for a key asks whether it waits in vain.
constexpr std::chrono::milliseconds kNewsInterval{200};

class Pause {
 public:
  explicit Pause(int ranks = 1, Deadline::Clock::duration waited = {})
      : longest_(std::max(kLongestPause, ranks * kPauseForEachRank)),
        length_(std::clamp(std::chrono::duration_cast<std::chrono::microseconds>(waited),
                           std::max(kFirstPause, ranks * kFirstPauseForEachRank), longest_)) {}

  void sleep_until(Deadline deadline) {
    std::this_thread::sleep_for(deadline.remaining(length_));
    length_ = std::min(length_ * 3 / 2, longest_);
  }

 private:
  const std::chrono::microseconds longest_;
  std::chrono::microseconds length_;
};

std::string has_not_come(const std::string& key) {
  return join("The key '", key,
              "' did not appear in the store in time: the rank that writes it has not come this "
              "far.");
}

class PolledStore final : public c10d::PrefixStore {
 public:
  PolledStore(c10::intrusive_ptr<c10d::Store> store, std::string news_key, CheckHope check_hope,
              Deadline deadline)
      : PrefixStore("polled", std::move(store)),
        news_key_(std::move(news_key)),
        check_hope_(std::move(check_hope)),
        deadline_(deadline) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return poll_store(store_->clone(), news_key_, check_hope_, deadline_);
  }

  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }

  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }

  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& /*timeout*/) override {
    wait(keys);
  }

  void wait(const std::vector<std::string>& keys) override {
    Deadline news = Deadline::in(kNewsInterval);
    Pause pause;
    while (!check(keys)) {
      if (news.has_passed()) {
        require_no_news();
        news = Deadline::in(kNewsInterval);
      }
      if (deadline_.has_passed()) {
        const auto missing = std::find_if(keys.begin(), keys.end(),
                                          [this](const auto& key) { return !check({key}); });
        C10_THROW_ERROR(DistStoreError,
                        "Timed out: " + has_not_come(missing != keys.end() ? *missing : keys[0]));
      }
      pause.sleep_until(deadline_);
    }
  }

 private:
  void require_no_news() {
    if (store_->check({news_key_})) {
      const std::vector<std::uint8_t> text = store_->get(news_key_);
      const ToldError told = ToldError::from_text(std::string(text.begin(), text.end()));
      C10_THROW_ERROR(DistStoreError, told.error.message);
    }
    if (check_hope_) {
      check_hope_();
    }
  }

  const std::string news_key_;
  const CheckHope check_hope_;
  const Deadline deadline_;
};

// What a call on another thread has come to.
template <typename Result>
struct Answer {
  std::mutex mutex;
  std::condition_variable has_come;
  bool is_there = false;     // guarded by mutex
  std::exception_ptr error;  // guarded by mutex
  Result result{};           // guarded by mutex
};

class TorchStore : public KeyValueStore {
 public:
  TorchStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience, int ranks)
      : store_(std::move(store)), patience_(patience), ranks_(ranks) {
    if (!store_) {
      throw InvalidUsage("A group needs a store for its ranks to meet at, and got None.");
    }
  }

  void set(const std::string& key, const std::string& value) override {
    ask<bool>("write", key, [key, value](c10d::Store& store) {
      store.set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
      return true;
    });
  }

  std::string settle(const std::string& key, const std::string& value) override {
    const auto settled =
        ask<std::vector<std::uint8_t>>("write", key, [key, value](c10d::Store& store) {
          return store.compareSet(key, {}, std::vector<std::uint8_t>(value.begin(), value.end()));
        });
    return {settled.begin(), settled.end()};
  }

  std::string get(const std::string& key, Deadline deadline) override {
    return go_on_waiting(key, deadline, Deadline::Clock::now());
  }

  std::string go_on_waiting(const std::string& key, Deadline deadline,
                            Deadline::Clock::time_point since) override {
    const Deadline::Clock::duration waited = Deadline::Clock::now() - since;
    Pause pause(ranks_, waited);
    if (waited >= kFirstPause && !deadline.has_passed()) {
      pause.sleep_until(deadline);  // it has asked at the end of the wait before
    }
    using Value = std::vector<std::uint8_t>;
    const auto look = [key](c10d::Store& store) {
      return store.check({key}) ? std::optional<Value>(store.get(key)) : std::nullopt;
    };
    while (true) {
      if (const auto value = ask<std::optional<Value>>("read", key, look)) {
        return {value->begin(), value->end()};
      }
      if (deadline.has_passed()) {
        throw Timeout(has_not_come(key));
      }
      check_interruption();
      pause.sleep_until(deadline);
    }
  }

  void erase(const std::string& key) override {
    try {
      ask<bool>("erase", key, [key](c10d::Store& store) { return store.deleteKey(key); });
    } catch (const TransportError&) {
      // Not every store can forget, and a store that is gone has forgotten.
    }
  }

 private:
  static TransportError unreachable(const char* verb, const std::string& key,
                                    const std::string& what) {
    return TransportError(
        join("Could not ", verb, " the key '", key,
             "' in the job's store: is the process that hosts it (the launcher or "
             "rank 0) still alive, and not stopped? ",
             what.substr(0, what.find('\n'))));
  }

  template <typename Result, typename Question>
  Result ask(const char* verb, const std::string& key, Question question) {
    auto answer = std::make_shared<Answer<Result>>();
    ElasticThreads::shared().post_or_run([answer, store = store_, question = std::move(question)] {
      Result result{};
      std::exception_ptr error;
      try {
        result = question(*store);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(answer->mutex);
      answer->is_there = true;
      answer->error = std::move(error);
      answer->result = std::move(result);
      answer->has_come.notify_all();
    });
    const Deadline deadline = Deadline::in(patience_);
    std::unique_lock lock(answer->mutex);
    while (!answer->has_come.wait_until(
        lock, deadline.earlier_of(Deadline::in(kInterruptionInterval)).when(),
        [&answer] { return answer->is_there; })) {
      if (deadline.has_passed()) {
        throw unreachable(verb, key, join("It has not answered for ", patience_.count(), " ms."));
      }
      lock.unlock();
      check_interruption();
      lock.lock();
    }
    if (answer->error) {
      try {
        std::rethrow_exception(answer->error);
      } catch (const std::exception& error) {
        throw unreachable(verb, key, error.what());
      }
    }
    return std::move(answer->result);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds patience_;
  const int ranks_;  // that wait there together
};

}  // namespace

StorePtr adapt_store(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience,
                     int ranks) {
  return std::make_shared<TorchStore>(std::move(store), patience, ranks);
}

c10::intrusive_ptr<c10d::Store> poll_store(c10::intrusive_ptr<c10d::Store> store,
                                           std::string news_key, CheckHope check_hope,
                                           Deadline deadline) {
  return c10::make_intrusive<PolledStore>(std::move(store), std::move(news_key),
                                          std::move(check_hope), deadline);
}

}  // namespace pydist
