#include "communicator/one_copy.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"
#include "memory/job_secret.h"
#include "memory/memory_room.h"
#include "memory/segment_exchange.h"

namespace pydist {
namespace {

constexpr const char* kPurpose = "the one copy of the parameters";

// What rank 0 tells the others.
struct Offer {
  std::array<char, 128> address{};  // of its server; empty: there is no room
  std::array<char, 64> key{};
  std::array<char, 72> secret{};
};

void put(const std::string& text, std::span<char> into) {
  PYDIST_CHECK(text.size() < into.size());
  std::memcpy(into.data(), text.data(), text.size());
}

void broadcast(Communicator& communicator, Offer& offer) {
  Operation operation;
  operation.kind = OpKind::kBroadcast;
  operation.label = "where the one copy of the parameters is";
  const Buffer buffer{&offer, sizeof offer, DType::kUInt8, Device{}};
  (communicator.rank() == 0 ? operation.inputs : operation.outputs) = {buffer};
  communicator.run(std::move(operation));
}

// Each rank backs an equal share of the memory, so that no NUMA node and no cgroup has all of it.
void reserve_share(const SharedSegment& segment, int rank, int size) {
  const std::size_t pages = segment.bytes() / page_bytes();
  const auto begin_of = [&](int part) {
    return pages * static_cast<std::size_t>(part) / static_cast<std::size_t>(size) * page_bytes();
  };
  segment.reserve(begin_of(rank), begin_of(rank + 1) - begin_of(rank), kPurpose);
}

// Sets `failed` to the highest rank, counted from 1, on which a step failed; to 0 if none did.
WorkPtr agree(Communicator& communicator, std::int64_t& failed) {
  Operation operation;
  operation.kind = OpKind::kAllReduce;
  operation.op = ReduceOp::kMax;
  operation.label = "whether all ranks have the one copy of the parameters";
  const Buffer buffer{&failed, 1, DType::kInt64, Device{}};
  operation.inputs = {buffer};
  operation.outputs = {buffer};
  return communicator.submit(std::move(operation));
}

// Hands the segment to the other ranks until every rank has it.
void serve_until(SegmentServer& server, const WorkPtr& done) {
  constexpr int kPauseMs = 5;
  while (!done->is_completed()) {
    pollfd request{server.fd(), POLLIN, 0};
    if (::poll(&request, 1, kPauseMs) > 0) {
      server.serve();
    }
  }
}

}  // namespace

OneCopy allocate_one_copy(Communicator& communicator, std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const bool is_first = communicator.rank() == 0;
  OneCopy copy;
  std::unique_ptr<SegmentServer> server;
  std::string error;
  Offer offer;
  if (is_first) {
    try {
      copy.segment = SharedSegment::create("one-copy", bytes);
      check_memory_room(copy.segment.bytes(), kPurpose);
      copy.view = PrivateView(copy.segment);
      server = std::make_unique<SegmentServer>();
      const std::string key = random_token();
      const JobSecret secret = JobSecret::random();
      server->offer(key, copy.segment.fd(), secret);
      put(server->address(), offer.address);
      put(key, offer.key);
      put(secret.key(), offer.secret);
    } catch (const std::exception& caught) {
      error = caught.what();
      offer.address = {};
    }
  }
  broadcast(communicator, offer);
  if (offer.address[0] == '\0') {
    throw TransportError(is_first ? error
                                  : join("rank 0 found no room for ", bytes,
                                         " bytes of shared memory; its own message says why."));
  }
  if (!is_first) {
    try {
      copy.segment = SharedSegment::map(
          fetch_segment(offer.address.data(), offer.key.data(), JobSecret(offer.secret.data()),
                        Deadline::in(communicator.timeout()), check_interruption)
              .fd,
          round_up(bytes, page_bytes()));
      copy.view = PrivateView(copy.segment);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
  if (error.empty()) {
    try {
      reserve_share(copy.segment, communicator.rank(), communicator.size());
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
  std::int64_t failed = error.empty() ? 0 : communicator.rank() + 1;
  const WorkPtr agreed = agree(communicator, failed);
  if (is_first) {
    serve_until(*server, agreed);
  }
  agreed->wait();
  if (failed != 0) {
    throw TransportError(join("rank ", failed - 1,
                              " can't map or back the one copy of the parameters that rank 0 made",
                              error.empty() ? "; its own message says why." : ": " + error,
                              " All ranks of one copy share a host."));
  }
  return copy;
}

}  // namespace pydist
