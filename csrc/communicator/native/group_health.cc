#include "communicator/native/group_health.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/log.h"
#include "base/log_queue.h"
#include "communicator/departure.h"
#include "health/process_state.h"

namespace pydist {
namespace {

std::string seconds_since(std::int64_t then_ns) {
  // Other processes write `then_ns`: as integers, the difference could overflow.
  const double seconds =
      std::max(0.0, (static_cast<double>(monotonic_ns()) - static_cast<double>(then_ns)) * 1e-9);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), seconds < 9.95 ? "%.1f s" : "%.0f s", seconds);
  return text.data();
}

// How long a rank that leaves lets the others find out by themselves what is wrong.
constexpr std::chrono::milliseconds kDeparturePatience{500};

// A heart that has not beaten for so long is told of.
constexpr double kSilence_ns = 2e9;

// For how long the peer's heart has not beaten, as far as is known here.
double silence_of(const Peer& peer) {
  const std::int64_t heartbeat = peer.page->heartbeat_ns.load(std::memory_order_relaxed);
  const bool is_unheard = heartbeat == 0 && peer.mirror != nullptr;
  // Other processes write it: as integers, the difference could overflow.
  const double silence = static_cast<double>(monotonic_ns()) - static_cast<double>(heartbeat);
  return is_unheard ? 0.0 : silence;
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
                         GroupSegment segment, std::vector<PeerPtr> peers,
                         std::chrono::nanoseconds long_wait, std::shared_ptr<RemoteRanks> remote)
    : name_(std::move(name)),
      rank_(rank),
      fingerprint_(fingerprint_on_host(name_)),
      fingerprint_on_gpu_(fingerprint_on_gpu(name_)),
      endpoint_(std::move(endpoint)),
      segment_(std::move(segment)),
      peers_(std::move(peers)),
      long_wait_(long_wait),
      remote_(std::move(remote)) {}

std::exception_ptr GroupHealth::failure() {
  if (has_left_.load(std::memory_order_acquire)) {
    return make_error(ErrorKind::kAborted,
                      "This rank has let go of the group '" + name_ +
                          "' (shutdown, or the last reference was dropped) while the operation "
                          "was under way.",
                      blame(rank_, how_left(rank_)));
  }
  return segment_.failure().error([this](int writer) {
    if (writer < 0 || writer >= size()) {
      return ErrorDescription{ErrorKind::kError,
                              join("The record of failure of the group '", name_, "' is damaged."),
                              {}};
    }
    const std::string cause = "has died or was stopped before it could say why";
    return ErrorDescription{ErrorKind::kError,
                            join("The group '", name_, "' is failing on ", who(writer), ", which ",
                                 cause, "; it ", activity(writer), "."),
                            blame(writer, cause)};
  });
}

void GroupHealth::fail(ErrorKind kind, const std::string& message, const Blame& blame) noexcept {
  const bool is_first = segment_.failure().set(kind, message, rank_, blame);
  wake_everybody();
  if (remote_) {
    log_errors_of([&] {
      if (is_first) {
        // As it is recorded, which cuts it to fit.
        remote_->send_failure(describe(segment_.failure().error()));
      }
      remote_->release_buffers();
    });
  }
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
    Blame& guilty = description.blame;
    // The error of this rank alone is its own doing.
    if (guilty.ranks.empty() && !names_ranks) {
      guilty.ranks = {rank_};
    }
    if (!guilty.ranks.empty() && guilty.host.empty() && guilty.ranks[0] >= 0 &&
        guilty.ranks[0] < size()) {
      const Peer& first = *peers_[static_cast<std::size_t>(guilty.ranks[0])];
      guilty.host = first.host;
      guilty.pid = first.pid;
    }
    fail(description.kind, description.message, guilty);
  } catch (...) {  // out of memory
    fail(ErrorKind::kError, std::string());
  }
}

void GroupHealth::leave() noexcept {
  if (has_left_.exchange(true)) {
    return;
  }
  // Sequentially consistent, as is the look at who writes into the heap that follows.
  segment_.control(rank_).has_left.store(static_cast<std::uint32_t>(own_departure()));
  wake_everybody();
  if (remote_) {
    log_errors_of([this] {
      remote_->pass_failure_on();
      remote_->send_departure();
      remote_->release_buffers();
    });
  }
}

void GroupHealth::release_buffers() noexcept {
  if (remote_) {
    log_errors_of([this] {
      remote_->release_buffers();
      remote_->pass_failure_on();
    });
  }
}

void GroupHealth::set_farewell(std::uint64_t done) noexcept {
  segment_.control(rank_).farewell.store(done, std::memory_order_relaxed);
}

void GroupHealth::wake_everybody() noexcept {
  for (const PeerPtr& peer : peers_) {
    peer->doorbell->ring();
  }
  endpoint_->progress()->wake_all();
}

bool GroupHealth::wait_for_heap_writers(std::chrono::nanoseconds patience) {
  if (!segment_.failure().is_set()) {
    // This rank leaves. The others may be about to find out why, a mismatch say, which tells them
    // more than that it has left.
    if (is_heap_at_rest(Deadline::in(kDeparturePatience))) {
      return true;
    }
    fail(ErrorKind::kPeerLost, departure_of(rank_) + " while an operation was under way.",
         blame(rank_, how_left(rank_)));
  }
  return is_heap_at_rest(Deadline::in(patience));
}

bool GroupHealth::is_heap_at_rest(Deadline deadline) const {
  for (int rank = 0; rank < size(); ++rank) {
    const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    // Sequentially consistent, as is the failure; see HeapWriting.
    while (rank != rank_ && segment_.control(rank).writes_heap.load() != 0) {
      if (peer.is_dead.load() && !peer.is_silent.load()) {
        break;
      }
      if (process_state(peer.local_pid) == ProcessState::kStopped || deadline.has_passed()) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return true;
}

std::string GroupHealth::who(int rank) const {
  return join("rank ", rank, " (", peers_[static_cast<std::size_t>(rank)]->description, ")");
}

KnownProcess GroupHealth::known(int rank) const {
  const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
  return {.rank = rank, .host = peer.host, .pid = peer.pid, .local_pid = peer.local_pid};
}

Blame GroupHealth::blame(int rank, std::string cause) const {
  const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
  return {.ranks = {rank},
          .host = peer.host,
          .pid = peer.pid,
          .operation = {},
          .cause = std::move(cause)};
}

std::optional<GroupHealth::Loss> GroupHealth::death() const {
  if (endpoint_->deaths() != 0) {
    for (int rank = 0; rank < size(); ++rank) {
      const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
      if (rank == rank_ || !peer.has_crashed()) {
        continue;
      }
      if (peer.is_silent.load(std::memory_order_relaxed)) {
        const std::string cause =
            join("has shown no sign of life for ",
                 seconds_since(peer.page->heartbeat_ns.load(std::memory_order_relaxed)));
        return Loss{join(who(rank), " ", cause,
                         ", and the system does not tell whether it lives; it ", activity(rank)),
                    blame(rank, cause)};
      }
      if (!peer.loss.empty()) {
        const std::string cause = join("can't be reached any more (", peer.loss, ")");
        return Loss{join(who(rank), " ", cause, "; it ", activity(rank)), blame(rank, cause)};
      }
      return Loss{join(who(rank), " has died; it ", activity(rank)), blame(rank, "has died")};
    }
  }
  return std::nullopt;
}

bool GroupHealth::has_left(int rank) const {
  if (rank == rank_) {
    return false;
  }
  const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
  if (remote_ && peer.link) {
    return remote_->is_gone(rank);
  }
  return peer.is_dead.load(std::memory_order_acquire) ||
         segment_.control(rank).has_left.load(std::memory_order_acquire) != 0;
}

const char* GroupHealth::how_left(int rank) const {
  const std::uint32_t told = segment_.control(rank).has_left.load(std::memory_order_acquire);
  return in_words(rank == rank_ && told == 0 ? own_departure() : static_cast<Departure>(told));
}

std::string GroupHealth::departure_of(int rank) const {
  return join(who(rank), " ", how_left(rank));
}

std::optional<GroupHealth::Loss> GroupHealth::why_vain(int rank) const {
  if (std::optional<Loss> loss = death()) {
    return loss;
  }
  if (rank >= 0) {
    return has_left(rank) ? std::optional(Loss{departure_of(rank), blame(rank, how_left(rank))})
                          : std::nullopt;
  }
  // To wait for anybody is no use once nobody else is left. A rank alone waits for itself.
  std::vector<int> others;
  for (int peer = 0; peer < size(); ++peer) {
    if (size() == 1 || (peer != rank_ && !has_left(peer))) {
      return std::nullopt;
    }
    if (peer != rank_) {
      others.push_back(peer);
    }
  }
  Loss loss{"every other rank has left the group", blame(others[0], how_left(others[0]))};
  loss.blame.ranks = std::move(others);
  return loss;
}

std::optional<Absence> GroupHealth::absence() const {
  if (std::optional<Loss> loss = death()) {
    return Absence{.what = std::move(loss->what), .blame = std::move(loss->blame)};
  }
  std::optional<Absence> worst;
  for (int peer = 0; peer < size(); ++peer) {
    if (!has_left(peer)) {
      continue;
    }
    Absence absence{.what = departure_of(peer),
                    .is_orderly = true,
                    .done = segment_.control(peer).farewell.load(std::memory_order_relaxed),
                    .blame = blame(peer, how_left(peer))};
    if (!worst || absence.is_worse_than(*worst)) {
      worst = std::move(absence);
    }
  }
  return worst;
}

std::vector<int> GroupHealth::not_begun(std::uint64_t fingerprint, std::uint64_t number) const {
  std::vector<int> late;
  for (int rank = 0; rank < size(); ++rank) {
    const std::vector<JournalEntry> entries =
        peers_[static_cast<std::size_t>(rank)]->page->journal.read();
    const auto last = std::find_if(
        entries.begin(), entries.end(),
        [fingerprint](const JournalEntry& entry) { return entry.group == fingerprint; });
    // A journal without any such entry may have forgotten them, unless it is far from full.
    const bool has_begun_none = last == entries.end() && entries.size() < Journal::kEntries / 2;
    if (rank != rank_ && (has_begun_none || (last != entries.end() && last->sequence < number))) {
      late.push_back(rank);
    }
  }
  return late;
}

bool GroupHealth::is_frozen(int rank) const {
  if (rank == rank_) {
    return false;
  }
  const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
  const ProcessState state = process_state(peer.local_pid);
  return state == ProcessState::kStopped || state == ProcessState::kDead ||
         silence_of(peer) > kSilence_ns;
}

std::string GroupHealth::plight(int rank) const {
  if (rank == rank_) {
    return {};
  }
  const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
  std::string text(in_words(process_state(peer.local_pid)));
  if (silence_of(peer) > kSilence_ns) {
    text += join(text.empty() ? "" : ", and ", "has shown no sign of life for ",
                 seconds_since(peer.page->heartbeat_ns.load(std::memory_order_relaxed)));
  }
  return text;
}

GroupHealth::Keeper GroupHealth::keeper_behind(int rank) const {
  std::vector<bool> seen(static_cast<std::size_t>(size()));
  std::string way;
  const auto keeper_at = [&](int here) {
    std::string its_plight = plight(here);
    return Keeper{
        here, here == rank ? "" : join("it waits for ", way, ", which waits for rank ", here, ". "),
        its_plight.empty() ? activity(here) : std::move(its_plight)};
  };
  std::optional<Keeper> first_elsewhere;
  for (int here = rank; !seen[static_cast<std::size_t>(here)];) {
    seen[static_cast<std::size_t>(here)] = true;
    const std::optional<int> next = here == rank_ ? rank : awaited_by(here);
    const bool is_end = !next || is_frozen(here);
    const bool is_elsewhere =
        here != rank_ && !peers_[static_cast<std::size_t>(here)]->page->awaited.is_in(fingerprint_);
    if (is_end) {
      return keeper_at(here);
    }
    if (is_elsewhere && !first_elsewhere) {
      first_elsewhere = keeper_at(here);
    }
    way += join(way.empty() ? "" : ", which waits for ", "rank ", here);
    here = *next;
  }
  return first_elsewhere ? *std::move(first_elsewhere) : Keeper{rank, "", activity(rank)};
}

std::optional<int> GroupHealth::awaited_by(int rank) const {
  const AwaitedRank& awaited = peers_[static_cast<std::size_t>(rank)]->page->awaited;
  if (const std::optional<int> here = awaited.in(fingerprint_)) {
    return *here >= 0 && *here < size() ? here : std::nullopt;
  }
  const std::optional<std::uint64_t> page = awaited.page();
  const auto found = std::find_if(peers_.begin(), peers_.end(), [&page](const PeerPtr& peer) {
    return page == peer->page->number.load(std::memory_order_relaxed);
  });
  return found == peers_.end() ? std::nullopt
                               : std::optional(static_cast<int>(found - peers_.begin()));
}

bool GroupHealth::leads_into_circle(int rank) const {
  const std::int64_t long_since =
      coarse_monotonic_ns() - std::chrono::nanoseconds(kCircleWait).count();
  struct Hop {
    int from;
    bool is_elsewhere;  // the wait is in another group
  };
  std::vector<Hop> way{{rank_, false}};
  for (int here = rank;;) {
    const auto begin =
        std::find_if(way.begin(), way.end(), [here](const Hop& hop) { return hop.from == here; });
    if (begin != way.end()) {
      return std::any_of(begin, way.end(), [](const Hop& hop) { return hop.is_elsewhere; });
    }
    const ProcessPage& page = *peers_[static_cast<std::size_t>(here)]->page;
    const std::vector<JournalEntry> entries = page.journal.read();
    const bool has_waited = std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
      return entry.state == JournalState::kRunning && entry.started_ns <= long_since &&
             page.awaited.is_in(entry.group);
    });
    const std::optional<int> next = awaited_by(here);
    if (!has_waited || !next) {
      return false;
    }
    way.push_back({here, !page.awaited.is_in(fingerprint_)});
    here = *next;
  }
}

void GroupHealth::warn_of_wait(const std::string& operation, std::chrono::nanoseconds lasting,
                               const std::string& why) {
  endpoint_->log().post(LogLevel::kWarning, long_wait_text(who(rank_), operation, lasting, why));
}

std::string GroupHealth::activity(int rank) const {
  const Journal& journal = peers_[static_cast<std::size_t>(rank)]->page->journal;
  const std::vector<JournalEntry> entries = journal.read();
  const auto name = [this](const JournalEntry& entry) {
    return entry_name(entry) + (is_of_group(entry) ? "" : " of another group");
  };
  for (const JournalEntry& entry : entries) {
    if (entry.state == JournalState::kRunning) {
      return join("is in ", name(entry), " since ", seconds_since(entry.started_ns));
    }
  }
  if (entries.empty()) {
    return peers_[static_cast<std::size_t>(rank)]->mirror != nullptr
               ? "has not told this host what it is in"
               : "has not entered any operation yet";
  }
  const JournalEntry& last = entries.front();
  return join(last.state == JournalState::kFailed ? "failed in " : "left ", name(last), " ",
              seconds_since(last.finished_ns), " ago and is in no operation");
}

bool GroupHealth::has_begun(int rank, std::uint64_t sequence) const {
  const std::vector<JournalEntry> entries =
      peers_[static_cast<std::size_t>(rank)]->page->journal.read();
  return std::any_of(entries.begin(), entries.end(), [&](const JournalEntry& entry) {
    return entry.group == fingerprint_ && entry.sequence >= sequence &&
           !is_point_to_point(static_cast<OpKind>(entry.kind));
  });
}

std::string GroupHealth::where(int rank, OpKind kind, std::uint64_t sequence) const {
  const std::size_t slot = sequence % kPostDepth;
  // A post that others pass on may be held up there (between_hosts/announcing.h).
  const bool entered =
      segment_.control(rank).posts[slot].sequence.load(std::memory_order_acquire) >= sequence ||
      has_begun(rank, sequence);
  std::string sentence =
      join(who(rank), entered ? " entered " : " never entered ", to_string(kind), " #", sequence,
           entered ? " but has not done its part" : "", "; it ", activity(rank));
  if (const std::string its_plight = plight(rank); !its_plight.empty()) {
    sentence += "; it " + its_plight;
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
