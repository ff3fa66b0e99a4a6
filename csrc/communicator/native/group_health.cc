#include "communicator/native/group_health.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/digest.h"

namespace pydist {
namespace {

std::uint64_t hash(const std::string& text) {
  Digest digest;
  digest.add(text);
  return digest.value();
}

std::string seconds_since(std::int64_t then_ns) {
  const double seconds = std::max(0.0, static_cast<double>(monotonic_ns() - then_ns) * 1e-9);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), seconds < 9.95 ? "%.1f s" : "%.0f s", seconds);
  return text.data();
}

std::string entry_name(const JournalEntry& entry) {
  std::string name = join(to_string(static_cast<OpKind>(entry.kind)), " #", entry.sequence);
  if (!entry.label.empty()) {
    name += " (" + entry.label + ")";
  }
  return name;
}

}  // namespace

GroupHealth::GroupHealth(std::string name, int rank, std::shared_ptr<Endpoint> endpoint,
                         GroupSegment segment, std::vector<PeerPtr> peers)
    : name_(std::move(name)),
      rank_(rank),
      fingerprint_(hash(name_)),
      endpoint_(std::move(endpoint)),
      segment_(std::move(segment)),
      peers_(std::move(peers)) {}

std::exception_ptr GroupHealth::failure() {
  if (has_left_.load(std::memory_order_acquire)) {
    return make_error(ErrorKind::kAborted,
                      "This rank has let go of the group '" + name_ +
                          "' (shutdown, or the last reference was dropped) while the operation "
                          "was under way.");
  }
  return segment_.failure().error([this](int writer) {
    if (writer < 0 || writer >= size()) {
      return join("The record of failure of the group '", name_, "' is damaged.");
    }
    return join("The group '", name_, "' is failing on ", who(writer),
                ", which has died or was stopped before it could say why; it ", activity(writer),
                ".");
  });
}

void GroupHealth::fail(ErrorKind kind, const std::string& message) noexcept {
  segment_.failure().set(kind, message, rank_);
  wake_everybody();
}

void GroupHealth::fail(const std::exception_ptr& error) noexcept {
  try {
    ErrorDescription description = describe(error);
    const bool names_ranks =
        description.kind == ErrorKind::kPeerLost || description.kind == ErrorKind::kTimeout;
    if (description.kind == ErrorKind::kMismatch) {
      description.message = join("Group '", name_, "', on ", who(rank_), ": ", description.message);
    } else if (!names_ranks && size() > 1) {
      description.message = "On " + who(rank_) + ": " + description.message;
    }
    fail(description.kind, description.message);
  } catch (...) {  // out of memory
    fail(ErrorKind::kError, std::string());
  }
}

void GroupHealth::leave() noexcept {
  if (has_left_.exchange(true)) {
    return;
  }
  segment_.control(rank_).has_left.store(1, std::memory_order_release);
  wake_everybody();
}

void GroupHealth::set_farewell(std::uint64_t done) noexcept {
  segment_.control(rank_).farewell.store(done, std::memory_order_relaxed);
}

void GroupHealth::wake_everybody() noexcept {
  for (const PeerPtr& peer : peers_) {
    peer->doorbell->ring();
  }
}

std::string GroupHealth::who(int rank) const {
  return join("rank ", rank, " (", peers_[static_cast<std::size_t>(rank)]->description, ")");
}

std::string GroupHealth::death() const {
  if (endpoint_->deaths() != 0) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank_ && peers_[static_cast<std::size_t>(peer)]->has_crashed()) {
        return who(peer) + " has died; it " + activity(peer);
      }
    }
  }
  return {};
}

bool GroupHealth::has_left(int rank) const {
  return rank != rank_ &&
         (segment_.control(rank).has_left.load(std::memory_order_acquire) != 0 ||
          peers_[static_cast<std::size_t>(rank)]->is_dead.load(std::memory_order_acquire));
}

std::string GroupHealth::departure_of(int rank) const {
  return who(rank) + " has left the group (shutdown)";
}

std::string GroupHealth::why_vain(int rank) const {
  if (std::string what = death(); !what.empty()) {
    return what;
  }
  if (rank >= 0) {
    return has_left(rank) ? departure_of(rank) : std::string();
  }
  // To wait for anybody is no use once nobody else is left. A rank alone waits for itself.
  for (int peer = 0; peer < size(); ++peer) {
    if (size() == 1 || (peer != rank_ && !has_left(peer))) {
      return {};
    }
  }
  return "every other rank has left the group (shutdown)";
}

std::optional<Absence> GroupHealth::absence() const {
  if (std::string what = death(); !what.empty()) {
    return Absence{.what = std::move(what)};
  }
  std::optional<Absence> worst;
  for (int peer = 0; peer < size(); ++peer) {
    if (!has_left(peer)) {
      continue;
    }
    Absence absence{.what = departure_of(peer),
                    .is_orderly = true,
                    .done = segment_.control(peer).farewell.load(std::memory_order_relaxed)};
    if (!worst || absence.is_worse_than(*worst)) {
      worst = std::move(absence);
    }
  }
  return worst;
}

std::string GroupHealth::activity(int rank) const {
  const Journal& journal = peers_[static_cast<std::size_t>(rank)]->page->journal;
  const std::vector<JournalEntry> entries = journal.read();
  for (const JournalEntry& entry : entries) {
    if (entry.state == JournalState::kRunning) {
      return join("is in ", entry_name(entry),
                  entry.group == fingerprint_ ? "" : " of another group", " since ",
                  seconds_since(entry.started_ns));
    }
  }
  for (const JournalEntry& entry : entries) {
    if (entry.group == fingerprint_) {
      return join("left ", entry_name(entry), " ", seconds_since(entry.finished_ns),
                  " ago and is in no operation");
    }
  }
  return entries.empty() ? "has not entered any operation yet"
                         : "is in no operation and never entered one of this group";
}

std::string GroupHealth::where(int rank, OpKind kind, std::uint64_t sequence) const {
  const std::size_t slot = sequence % kPostDepth;
  const bool entered =
      segment_.control(rank).posts[slot].sequence.load(std::memory_order_acquire) >= sequence;
  std::string sentence =
      join(who(rank), entered ? " entered " : " never entered ", to_string(kind), " #", sequence,
           entered ? " but has not done its part" : "", "; it ", activity(rank));
  const std::int64_t heartbeat =
      peers_[static_cast<std::size_t>(rank)]->page->heartbeat_ns.load(std::memory_order_relaxed);
  if (rank != rank_ && monotonic_ns() - heartbeat > 2'000'000'000) {
    sentence += join(", and has shown no sign of life for ", seconds_since(heartbeat),
                     " (stopped, swapped out or starved)");
  }
  return sentence;
}

std::vector<std::string> GroupHealth::whereabouts() const {
  std::vector<std::string> lines;
  for (int rank = 0; rank < size(); ++rank) {
    const bool is_dead = peers_[static_cast<std::size_t>(rank)]->is_dead.load();
    lines.push_back(join(who(rank), is_dead ? " has died; it " : " ", activity(rank)));
  }
  return lines;
}

}  // namespace pydist
