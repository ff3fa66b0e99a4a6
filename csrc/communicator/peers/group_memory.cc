#include "communicator/peers/group_memory.h"

#include <utility>

namespace pydist {
namespace {

constexpr const char* kGroup = "/group";
constexpr const char* kMessages = "/messages";
constexpr const char* kCollectives = "/collectives";
constexpr const char* kHeap = "/heap";

}  // namespace

void GroupMemory::create(const Placement& placement, int host) {
  lanes_ = LaneTable(placement, host);
  group_ = SharedSegment::create("group", GroupSegment::bytes(size_, chunk_bytes_));
  group().reserve_common();
  messages_ = SharedSegment::create("messages", LaneSegment::bytes(lanes_, kMessageLanes));
  if (placement.spans_hosts()) {
    collectives_ = SharedSegment::create(
        "collectives", LaneSegment::bytes(lanes_, collective_lanes(chunk_bytes_)));
  }
  heap_ = SharedFile::create("heap");
}

std::vector<SegmentOffer> GroupMemory::offer(SegmentServer& server, const std::string& token,
                                             const JobSecret& secret) const {
  std::vector<SegmentOffer> offers;
  const auto add = [&](const char* name, int fd) {
    offers.emplace_back(server, token + name, fd, secret);
  };
  add(kGroup, group_.fd());
  add(kMessages, messages_.fd());
  add(kHeap, heap_.fd());
  if (collectives_.data() != nullptr) {
    add(kCollectives, collectives_.fd());
  }
  return offers;
}

std::vector<const char*> GroupMemory::names(const Placement& placement) {
  std::vector<const char*> all{kGroup, kMessages, kHeap};
  if (placement.spans_hosts()) {
    all.push_back(kCollectives);
  }
  return all;
}

void GroupMemory::fetch(const Placement& placement, int host,
                        const std::function<FileDescriptor(const char* name)>& fetch) {
  lanes_ = LaneTable(placement, host);
  const auto map = [&fetch](const char* name, std::size_t bytes) {
    return SharedSegment::map(fetch(name), round_up(bytes, page_bytes()));
  };
  group_ = map(kGroup, GroupSegment::bytes(size_, chunk_bytes_));
  messages_ = map(kMessages, LaneSegment::bytes(lanes_, kMessageLanes));
  if (placement.spans_hosts()) {
    collectives_ = map(kCollectives, LaneSegment::bytes(lanes_, collective_lanes(chunk_bytes_)));
  }
  heap_ = SharedFile(fetch(kHeap));
}

void GroupMemory::reserve(int rank, const Placement& placement) const {
  const bool is_leader = rank == placement.leader_of(placement.host_of(rank));
  for (int each = 0; each < size_; ++each) {
    if (each == rank || (is_leader && !placement.share_host(each, rank))) {
      group().reserve_control(each);
      messages().reserve_counters(each);
      if (placement.spans_hosts()) {
        collectives().reserve_counters(each);
      }
    }
  }
}

}  // namespace pydist
