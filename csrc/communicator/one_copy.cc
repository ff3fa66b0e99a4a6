#include "communicator/one_copy.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "base/interruption.h"
#include "communicator/complaints.h"
#include "memory/job_secret.h"
#include "memory/memory_room.h"
#include "memory/segment_exchange.h"

namespace pydist {
namespace {

constexpr const char* kOneCopy = "the one copy of the parameters";

// What rank 0 tells the others. Not the secret: only where it is.
struct CopyOffer {
  std::array<char, 128> address{};  // of its server; empty: it has failed
  std::array<char, 64> key{};
  std::array<char, 4096> secret_folder{};  // empty: the secret is that of the environment
  std::array<char, 72> signature{};        // of the address
};

void put(const std::string& text, std::span<char> into) {
  PYDIST_CHECK(text.size() < into.size());
  std::memcpy(into.data(), text.data(), text.size());
}

void broadcast(Communicator& communicator, CopyOffer& offer) {
  Operation operation{.kind = OpKind::kBroadcast,
                      .label = "where the one copy of the parameters is"};
  const Buffer buffer{&offer, sizeof offer, DType::kUInt8, Device{}};
  (communicator.rank() == 0 ? operation.inputs : operation.outputs) = {buffer};
  communicator.run(std::move(operation));
}

// Rank 0's part, for as long as the others fetch the segment.
class Giver {
 public:
  Giver(const SharedSegment& segment, CopyOffer& offer) {
    const std::string key = random_token();
    const std::optional<std::string> given = Environment::read().job_secret;
    const JobSecret secret = given ? JobSecret(*given) : JobSecret::random();
    if (!given) {
      file_.emplace(key, secret);
      put(file_->folder(), offer.secret_folder);
    }
    server_.offer(key, segment.fd(), secret.derive(key));
    put(key, offer.key);
    put(secret.sign(server_.address()), offer.signature);
    put(server_.address(), offer.address);
  }

  void serve() {
    constexpr int kPauseMs = 5;
    pollfd request{server_.fd(), POLLIN, 0};
    if (::poll(&request, 1, kPauseMs) > 0) {
      server_.serve();
    }
  }

 private:
  std::optional<SecretFile> file_;
  SegmentServer server_;
};

FileDescriptor fetch(const CopyOffer& offer, Deadline deadline,
                     const std::function<void()>& check) {
  const std::optional<std::string> given = Environment::read().job_secret;
  const JobSecret secret =
      given ? JobSecret(*given) : read_secret(offer.secret_folder.data(), offer.key.data());
  if (!secret.has_signed(offer.address.data(), offer.signature.data())) {
    throw TransportError(
        "its secret is not that of rank 0: set PYDIST_JOB_SECRET alike on all ranks, or on none.");
  }
  return std::move(fetch_segment(offer.address.data(), offer.key.data(),
                                 secret.derive(offer.key.data()), deadline, check)
                       .fd);
}

// Each rank backs an equal share of the memory, so that no NUMA node and no cgroup has all of it.
void reserve_share(const SharedSegment& segment, int rank, int size) {
  const std::size_t pages = segment.bytes() / page_bytes();
  const auto begin_of = [&](int part) {
    return pages * static_cast<std::size_t>(part) / static_cast<std::size_t>(size) * page_bytes();
  };
  segment.reserve(begin_of(rank), begin_of(rank + 1) - begin_of(rank), kOneCopy);
}

}  // namespace

OneCopy allocate_one_copy(Communicator& communicator, std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);
  const bool is_first = communicator.rank() == 0;
  OneCopy copy;
  CopyOffer offer;
  std::optional<Giver> giver;
  std::string complaint;
  std::exception_ptr interruption;
  const auto attempt = [&](const auto& step) {
    try {
      if (complaint.empty()) {
        step();
      }
    } catch (const std::exception& error) {
      complaint = *error.what() != '\0' ? error.what() : "an error without a text";
    }
  };
  if (is_first) {
    attempt([&] {
      copy.segment = SharedSegment::create("one-copy", bytes);
      check_memory_room(copy.segment.bytes(), kOneCopy);
      giver.emplace(copy.segment, offer);
    });
  }
  broadcast(communicator, offer);
  if (offer.address[0] != '\0') {
    attempt([&] {
      if (!is_first) {
        const auto check = [&interruption] {
          try {
            check_interruption();
          } catch (...) {
            interruption = std::current_exception();
            throw Aborted(join("it was interrupted (", kWhatInterrupts, ")."));
          }
        };
        copy.segment = SharedSegment::map(fetch(offer, Deadline::in(communicator.timeout()), check),
                                          round_up(bytes, page_bytes()));
      }
      copy.view = PrivateView(copy.segment);
      reserve_share(copy.segment, communicator.rank(), communicator.size());
    });
  }
  const Hearing hearing =
      hear_all(communicator, complaint, "whether all ranks have the one copy of the parameters",
               true, giver ? std::function<void()>([&giver] { giver->serve(); }) : nullptr);
  if (interruption != nullptr) {
    std::rethrow_exception(interruption);
  }
  if (hearing.first) {
    throw TransportError(join("The ranks cannot have one copy of the parameters, for which all of ",
                              "them share a host: rank ", hearing.first->rank, ": ",
                              hearing.first->text));
  }
  return copy;
}

}  // namespace pydist
