#include "communicator/native/process_reads.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "collectives/heap_access.h"

namespace pydist {

ReadProcess process_reads(std::shared_ptr<const Group> group) {
  if (!group->reads_processes()) {
    return nullptr;
  }
  return [group = std::move(group)](int peer, std::uint64_t address, std::span<std::byte> target) {
    if (group->process(peer).read(target.data(), address, target.size()) != 0) {
      return false;
    }
    // A sender that has raised, or left, has its memory to itself again.
    require_right_reads(*group);
    return !has_left(*group, peer);
  };
}

}  // namespace pydist
