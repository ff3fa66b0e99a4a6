#include "communicator/open_communicators.h"

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

}  // namespace

void note_open(const CommunicatorPtr& communicator) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.all, [](const auto& each) { return each.expired(); });
  known.all.push_back(communicator);
}

void shut_down_all() noexcept {
  std::vector<std::weak_ptr<Communicator>> all;
  {
    Registry& known = registry();
    const std::lock_guard lock(known.mutex);
    all.swap(known.all);
  }
  for (const auto& each : all) {
    if (const CommunicatorPtr communicator = each.lock()) {
      communicator->shutdown();
    }
  }
}

}  // namespace pydist
