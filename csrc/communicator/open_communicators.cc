#include "communicator/open_communicators.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace pydist {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> all;  // guarded by mutex
};

// Never destroyed: communicators may outlive the statics of this file.
Registry& registry() {
  static auto* const the_registry = new Registry;
  return *the_registry;
}

std::atomic<bool> is_ending{false};

}  // namespace

void note_open(const CommunicatorPtr& communicator) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.all, [](const auto& each) { return each.expired(); });
  known.all.push_back(communicator);
}

bool is_process_ending() noexcept { return is_ending.load(std::memory_order_relaxed); }

void shut_down_all() noexcept {
  is_ending.store(true, std::memory_order_relaxed);
  std::vector<std::weak_ptr<Communicator>> all;
  {
    Registry& known = registry();
    const std::lock_guard lock(known.mutex);
    all.swap(known.all);
  }
  // The newest first: those that others are built on outlive them.
  for (auto each = all.rbegin(); each != all.rend(); ++each) {
    if (const CommunicatorPtr communicator = each->lock()) {
      communicator->shutdown();
    }
  }
}

}  // namespace pydist
