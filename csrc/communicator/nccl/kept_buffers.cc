#include "communicator/nccl/kept_buffers.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "communicator/nccl/freed_device_memory.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/streams_of_process.h"
#include "communicator/open_communicators.h"

namespace pydist {

KeptBuffers& KeptBuffers::of_process() {
  static auto* const kept = new KeptBuffers;
  return *kept;
}

KeptBuffers::Holding KeptBuffers::hold(std::span<const Operation> operations,
                                       const std::shared_ptr<const cuda::OwnedStream>& stream,
                                       int device) {
  Holding holding;
  for (const Operation& operation : operations) {
    const bool is_held =
        operation.owner == nullptr || (!holding.empty() && holding.back().owner == operation.owner);
    if (!is_held) {
      holding.push_back({operation.owner, stream, device});
    }
  }
  return holding;
}

std::size_t KeptBuffers::bytes_of(const Holding& holding) {
  std::map<const void*, std::size_t> blocks;
  for (const Held& held : holding) {
    for (const auto& [data, bytes] : held.owner->blocks()) {
      blocks[data] = std::max(blocks[data], bytes);
    }
  }
  std::size_t total = 0;
  for (const auto& [data, bytes] : blocks) {
    total += bytes;
  }
  return total;
}

void KeptBuffers::keep(Holding holding) noexcept {
  const std::lock_guard lock(mutex_);
  count_ += holding.size();
  held_.splice(held_.end(), holding);
}

void KeptBuffers::let_go(Holding holding) noexcept {
  holding.remove_if([](const Held& held) { return held.owner.use_count() > 1; });
  keep(std::move(holding));
}

void KeptBuffers::release() noexcept {
  if (is_empty() || is_process_ending() || in_forked_child()) {
    return;
  }
  const std::unique_lock releasing(release_mutex_, std::try_to_lock);
  if (!releasing.owns_lock()) {
    return;  // another thread is at it
  }
  try {
    if (StreamsOfProcess::of_process().capture()) {
      return;
    }
    std::vector<Holding::iterator> known;
    {
      const std::lock_guard lock(mutex_);
      for (auto each = held_.begin(); each != held_.end(); ++each) {
        known.push_back(each);
      }
    }
    const auto is_over = [](const Held& held) {
      try {
        return is_idle(*held.stream, held.device);
      } catch (const std::exception&) {
        return false;  // CUDA has failed, and takes the memory with it
      }
    };
    const auto over = std::make_shared<Holding>();
    for (const Holding::iterator each : known) {
      if (is_over(*each)) {
        const std::lock_guard lock(mutex_);
        over->splice(over->end(), held_, each);
      }
    }
    if (over->empty()) {
      return;
    }
    const std::size_t given_back = over->size();
    try {
      LateEnds::of_process().start(
          "pydist-nccl-mem",
          [over] {
            over->clear();
            StreamsOfProcess::of_process().prune();
          },
          Deadline::in(kFreePatience), "");
      count_ -= given_back;
    } catch (const std::exception&) {  // no thread to be had
      const std::lock_guard lock(mutex_);
      held_.splice(held_.end(), *over);
    }
  } catch (const std::exception&) {
    // No memory for the list, or CUDA has failed: another time, if ever.
  }
}

}  // namespace pydist
