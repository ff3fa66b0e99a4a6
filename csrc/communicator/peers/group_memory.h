// The memory that the ranks of a group share on one host, as it is made: by the lowest rank of the
// host, from whom the others fetch it. A value that shares what it holds.

#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "collectives/group_segment.h"
#include "memory/segment_exchange.h"
#include "memory/shared_segment.h"
#include "topology/placement.h"
#include "transport/lane_segment.h"

namespace pydist {

class GroupMemory {
 public:
  // None yet. `size` and `chunk_bytes` are the group's.
  GroupMemory(int size, std::size_t chunk_bytes) noexcept
      : size_(size), chunk_bytes_(chunk_bytes) {}

  // New memory for the ranks of a host, with what is everybody's backed. Throws TransportError.
  void create(const Placement& placement, int host);

  // Lets the other ranks of the host fetch it, as long as the offers live.
  [[nodiscard]] std::vector<SegmentOffer> offer(SegmentServer& server, const std::string& token,
                                                const JobSecret& secret) const;
  // The names of what there is to fetch.
  [[nodiscard]] static std::vector<const char*> names(const Placement& placement);
  // Gets what another rank of the host offers; `fetch` gets one segment by its name.
  void fetch(const Placement& placement, int host,
             const std::function<FileDescriptor(const char* name)>& fetch);
  // Backs a rank's part. The lowest rank of a host also takes those of the ranks on other hosts.
  void reserve(int rank, const Placement& placement) const;

  [[nodiscard]] GroupSegment group() const { return {group_, size_, chunk_bytes_}; }
  [[nodiscard]] LaneSegment messages() const { return {messages_, lanes_, kMessageLanes}; }
  // Which only a group has that spans hosts.
  [[nodiscard]] LaneSegment collectives() const {
    return {collectives_, lanes_, collective_lanes(chunk_bytes_)};
  }
  [[nodiscard]] SharedFile heap() const { return heap_; }

 private:
  int size_;
  std::size_t chunk_bytes_;
  SharedSegment group_;
  LaneTable lanes_;
  SharedSegment messages_;
  SharedSegment collectives_;  // none on one host
  SharedFile heap_;
};

}  // namespace pydist
