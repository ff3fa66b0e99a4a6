#include "communicator/nccl_watchdog.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/engine_thread.h"
#include "base/fork.h"
#include "communicator/nccl_group.h"

namespace pydist {

// The thread holds it, and may outlive the watchdog for a moment.
struct NcclWatchdog::Shared {
  std::mutex mutex;
  std::condition_variable wakened;
  std::vector<std::weak_ptr<NcclGroup>> groups;  // guarded by mutex
  bool is_stopping = false;                      // guarded by mutex
  std::atomic<bool> is_idle{true};
  std::thread thread;
};

std::shared_ptr<NcclWatchdog> NcclWatchdog::of_process() {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::weak_ptr<NcclWatchdog>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<NcclWatchdog> watchdog = known.lock();
  if (watchdog == nullptr) {
    watchdog = std::make_shared<NcclWatchdog>();
    known = watchdog;
  }
  return watchdog;
}

NcclWatchdog::NcclWatchdog() : shared_(std::make_shared<Shared>()) {
  shared_->thread = start_engine_thread("pydist-nccl", [shared = shared_] { run(shared); });
}

NcclWatchdog::~NcclWatchdog() {
  if (in_forked_child()) {
    shared_->thread.detach();  // it runs in the parent
    return;
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_stopping = true;
  }
  shared_->wakened.notify_all();
  // The last group may end on the thread itself, which then ends by itself.
  if (shared_->thread.get_id() == std::this_thread::get_id()) {
    shared_->thread.detach();
  } else {
    shared_->thread.join();
  }
}

void NcclWatchdog::watch(const std::shared_ptr<NcclGroup>& group) {
  const std::lock_guard lock(shared_->mutex);
  shared_->groups.push_back(group);
}

void NcclWatchdog::wake() noexcept {
  if (shared_->is_idle.load(std::memory_order_seq_cst)) {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_idle.store(false, std::memory_order_relaxed);
    shared_->wakened.notify_all();
  }
}

void NcclWatchdog::run(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (!shared->is_stopping) {
    std::vector<std::shared_ptr<NcclGroup>> groups;
    std::erase_if(shared->groups, [](const auto& each) { return each.expired(); });
    for (const auto& each : shared->groups) {
      if (auto group = each.lock()) {
        groups.push_back(std::move(group));
      }
    }
    // Before the look: whatever is launched after it finds the thread idle, and wakes it.
    shared->is_idle.store(true, std::memory_order_seq_cst);
    lock.unlock();
    auto pause = std::chrono::milliseconds::max();
    for (const auto& group : groups) {
      pause = std::min(pause, group->watch());
    }
    groups.clear();
    lock.lock();
    if (pause != std::chrono::milliseconds::max()) {
      shared->wakened.wait_for(lock, pause, [&] {
        return shared->is_stopping || !shared->is_idle.load(std::memory_order_relaxed);
      });
    } else {
      shared->wakened.wait(lock, [&] {
        return shared->is_stopping || !shared->is_idle.load(std::memory_order_relaxed);
      });
    }
  }
}

}  // namespace pydist
