#include "communicator/native/introduction.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "base/error.h"
#include "topology/hosts.h"
#include "topology/rendezvous.h"

namespace pydist {
namespace {

constexpr std::chrono::microseconds kDefaultSpin{50};

// Grows whenever the layout of anything in shared memory changes, so that two builds of one version
// do not read each other's memory.
constexpr int kSharedLayout = 7;

}  // namespace

std::string Introduction::to_text() const {
  return pack({card.to_text(), settings, token, secret_folder, complaint});
}

Introduction Introduction::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 5);
  return {Card::from_text(parts[0]), parts[1], parts[2], parts[3], parts[4]};
}

std::string settings_text(const Environment& environment) {
  return join("layout ", kSharedLayout, " PYDIST_ALGORITHM=", to_string(environment.algorithm),
              " PYDIST_CHUNK_BYTES=", environment.chunk_bytes);
}

void check_introductions(const std::vector<Introduction>& ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const Introduction& each = ranks[rank];
    const auto blame = [&](std::string cause) {
      return Blame{.ranks = {static_cast<int>(rank)},
                   .host = each.card.host_name,
                   .pid = each.card.pid,
                   .cause = std::move(cause)};
    };
    if (!each.complaint.empty()) {
      throw TransportError(join("rank ", rank, ": ", each.complaint), blame(each.complaint));
    }
    if (each.card.host_identity != ranks[0].card.host_identity) {
      throw TransportError(
          join("The native backend joins the ranks of one host, but rank 0 is on "
               "host ",
               ranks[0].card.host_name, " (", ranks[0].card.host_identity, ") and rank ", rank,
               " on host ", each.card.host_name, " (", each.card.host_identity,
               "). Use PYDIST_BACKEND=gloo or auto across hosts."),
          blame("is on another host than rank 0"));
    }
    if (each.settings != ranks[0].settings) {
      throw TransportError(join("Rank 0 runs with ", ranks[0].settings, ", but rank ", rank,
                                " with ", each.settings, "; set them alike on all ranks."),
                           blame("has other settings than rank 0"));
    }
  }
}

std::chrono::nanoseconds spin_time(const Environment& environment,
                                   const std::vector<Introduction>& ranks) {
  if (environment.spin) {
    return *environment.spin;
  }
  std::vector<std::vector<int>> allowed;
  std::optional<double> quota;
  for (const Introduction& each : ranks) {
    allowed.push_back(each.card.processors);
    if (each.card.processor_quota) {
      quota = std::min(quota.value_or(*each.card.processor_quota), *each.card.processor_quota);
    }
  }
  return has_core_for_every_rank(allowed, quota) ? std::chrono::nanoseconds(kDefaultSpin)
                                                 : std::chrono::nanoseconds::zero();
}

}  // namespace pydist
