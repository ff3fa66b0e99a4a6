#include "communicator/native/group_meeting.h"

#include <unistd.h>

#include <chrono>
#include <exception>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"
#include "communicator/native/introduction.h"
#include "memory/memory_room.h"
#include "memory/segment_exchange.h"
#include "topology/culprits.h"
#include "topology/hosts.h"
#include "topology/rendezvous.h"

namespace pydist {
namespace {

// The shared memory of a group.
struct Segments {
  SharedSegment group;
  SharedSegment messages;
  SharedFile heap;
};

std::string topic_of(const std::string& name) { return "pydist/" + name; }
std::string introduction_topic(const std::string& name) { return topic_of(name) + "/introduction"; }

// What the complaint of a rank that fails says of an error.
std::string words_of(const std::exception& error) {
  const std::string_view what = error.what();
  return what.empty() ? "an error without a text" : std::string(what);
}

// How often a rank that waits for another one to answer looks whether anybody has failed.
constexpr std::chrono::milliseconds kNewsInterval{50};

// Thrown where another rank has failed, which tells why.
struct OtherFailed {};

class Meeting {
 public:
  Meeting(KeyValueStore& store, int rank, int size, const NativeOptions& options,
          std::shared_ptr<Endpoint> endpoint)
      : store_(store),
        rank_(rank),
        size_(size),
        options_(options),
        topic_(topic_of(options.name)),
        chunk_bytes_(round_up(options.environment.chunk_bytes, page_bytes())),
        deadline_(Deadline::in(options.environment.timeout)) {
    membership_.endpoint = std::move(endpoint);
  }

  NativeMembership hold() {
    if (size_ == 1) {
      stay_alone();
    } else {
      introduce();
      std::vector<SegmentOffer> offers;  // until everybody has them, or nobody will
      conclude(try_to_share(offers));
      membership_.endpoint->limit_spin(spin_time(options_.environment, introductions_));
    }
    membership_.group_segment = GroupSegment(std::move(segments_.group), size_, chunk_bytes_);
    membership_.message_segment = MessageSegment(std::move(segments_.messages), size_);
    membership_.heap_file = std::move(segments_.heap);
    return std::move(membership_);
  }

 private:
  // What keeps this rank from sharing memory with the others, as conclude() tells it; empty:
  // nothing. Throws where this rank can't wait for them any more.
  [[nodiscard]] std::string try_to_share(std::vector<SegmentOffer>& offers) {
    try {
      share(offers);
      return {};
    } catch (const OtherFailed&) {
      return {};
    } catch (const PeerLost& error) {
      note_failure();
      excuse(store_, joined(), rank_, size_,
             complaint({ErrorKind::kPeerLost, error.what(), error.blame()}));
      throw;
    } catch (const std::exception& error) {
      note_failure();
      if (interruption_ == nullptr) {
        // What has come to its end (descriptors, say) may be needed to tell the others.
        offers.clear();
        segments_ = Segments();
        const auto* const ours = dynamic_cast<const Error*>(&error);
        return complaint(
            {ErrorKind::kTransport, words_of(error), ours != nullptr ? ours->blame() : Blame()});
      }
      excuse(store_, joined(), rank_, size_,
             complaint({ErrorKind::kAborted, join("it was interrupted (", kWhatInterrupts, ")."),
                        own_blame(rank_, "was interrupted")}));
      std::rethrow_exception(interruption_);
    }
  }

  // Throws the error of the lowest rank that has one.
  void conclude(const std::string& mine) {
    const std::vector<std::string> all =
        exchange(store_, joined(), rank_, size_, mine, deadline_, [this] { check_hope(); });
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty()) {
        continue;
      }
      ErrorDescription told = ToldError::from_text(all[rank]).error;
      if (told.blame.ranks.empty()) {
        const Card& card = introductions_[rank].card;
        told.blame = {.ranks = {static_cast<int>(rank)},
                      .host = card.host_name,
                      .pid = card.pid,
                      .operation = {},
                      .cause = told.message};
      }
      std::rethrow_exception(make_error(
          told.kind, join("The ranks cannot share memory: rank ", rank, ": ", told.message),
          told.blame));
    }
    PYDIST_CHECK(!has_other_failed_);
  }

  // Ends the others' waits for what this rank will not hand out. They learn why in conclude().
  void note_failure() noexcept {
    try {
      store_.set(failed_key(), "");
    } catch (const std::exception&) {
      // Somebody else has failed before, or the store is gone.
    }
  }
  void look_for_failure() {
    if (!next_look_.has_passed()) {
      return;
    }
    next_look_ = Deadline::in(kNewsInterval);
    try {
      static_cast<void>(store_.get(failed_key(), Deadline::in(std::chrono::nanoseconds::zero())));
    } catch (const Timeout&) {
      return;
    }
    has_other_failed_ = true;
    throw OtherFailed();  // NOLINT(bugprone-std-exception-baseclass): no handler of errors takes it
  }
  [[nodiscard]] std::string failed_key() const { return topic_ + "/failed"; }

  [[nodiscard]] std::string complaint(ErrorDescription error) const {
    return ToldError{rank_, std::move(error)}.to_text();
  }

  [[nodiscard]] std::string joined() const { return topic_ + "/joined"; }

  // Ends a wait that is in vain, or that the user interrupts.
  void check_hope() {
    if (options_.check_hope) {
      options_.check_hope();
    }
    for (std::size_t rank = 0; rank < membership_.peers.size(); ++rank) {
      const Peer& peer = *membership_.peers[rank];
      if (peer.has_crashed()) {
        throw PeerLost(peer.description + " died before the group was made.",
                       Blame{.ranks = {static_cast<int>(rank)},
                             .host = peer.host,
                             .pid = peer.pid,
                             .cause = "has died"});
      }
    }
    try {
      check_interruption();
    } catch (...) {
      interruption_ = std::current_exception();
      throw;
    }
  }

  void stay_alone() {
    if (!membership_.endpoint) {
      membership_.endpoint = Endpoint::of_process(options_.environment);
    }
    Endpoint& endpoint = *membership_.endpoint;
    create_segments();
    reserve_own();
    auto self = std::make_shared<Peer>();
    self->description = join("pid ", ::getpid(), " on host ", host_name());
    self->host = host_name();
    self->pid = self->local_pid = ::getpid();
    self->page = &endpoint.page();
    self->doorbell = &endpoint.doorbell();
    membership_.peers.push_back(std::move(self));
    membership_.memory_limits.push_back(memory_limits());
  }

  // Tells the others who this rank is, or why it cannot take part.
  void introduce() {
    Introduction mine;
    mine.card.host_name = host_name();
    mine.card.pid = ::getpid();
    mine.settings = settings_text(options_.environment);
    if (!options_.secret && options_.environment.job_secret) {
      // So that ranks with different ones learn it here, and not at the deadline.
      mine.settings += " PYDIST_JOB_SECRET=#" +
                       JobSecret(*options_.environment.job_secret).sign("whether it is the same");
    }
    try {
      if (!membership_.endpoint) {
        membership_.endpoint = Endpoint::of_process(options_.environment);
      }
      if (rank_ == 0) {
        mine.token = random_token();
        create_segments();
        if (!options_.secret && !options_.environment.job_secret) {
          made_secret_ = JobSecret::random();
          secret_file_.emplace(mine.token, *made_secret_);
          mine.secret_folder = secret_file_->folder();
        }
      }
      mine.card = membership_.endpoint->card();
    } catch (const std::exception& error) {
      mine.complaint = words_of(error);
      segments_ = Segments();
      secret_file_.reset();
    }
    for (const std::string& text : exchange(store_, introduction_topic(options_.name), rank_, size_,
                                            mine.to_text(), deadline_, options_.check_hope)) {
      introductions_.push_back(Introduction::from_text(text));
    }
    check_introductions(introductions_);
  }

  [[nodiscard]] JobSecret secret() const {
    if (options_.secret) {
      return *options_.secret;
    }
    if (options_.environment.job_secret) {
      return JobSecret(*options_.environment.job_secret);
    }
    const Introduction& first = introductions_[0];
    return made_secret_ ? *made_secret_ : read_secret(first.secret_folder, first.token);
  }

  // Gets what the group is made of, and backs this rank's part of it with memory.
  void share(std::vector<SegmentOffer>& offers) {
    Endpoint& endpoint = *membership_.endpoint;
    const std::string& token = introductions_[0].token;
    const Trust trust{token, secret().derive(token)};
    membership_.secret = std::make_shared<const JobSecret>(trust.secret.derive("splits"));
    offers = endpoint.receive(trust);
    const auto offer = [&](const char* name, int fd) {
      offers.emplace_back(endpoint.server(), token + name, fd, trust.secret);
    };
    if (rank_ == 0) {
      offer("/group", segments_.group.fd());
      offer("/messages", segments_.messages.fd());
      offer("/heap", segments_.heap.fd());
    }
    for (int peer = 0; peer < size_; ++peer) {
      const Card& card = introductions_[static_cast<std::size_t>(peer)].card;
      membership_.memory_limits.push_back(card.memory_limits);
      try {
        membership_.peers.push_back(endpoint.meet(card, trust, deadline_, [&] {
          look_for_failure();
          check_hope();
        }));
      } catch (const Error& error) {
        Blame blame = error.blame();
        if (blame.ranks.empty() && blame.pid != 0) {
          blame.ranks = {peer};  // meet() does not know the ranks
        }
        std::rethrow_exception(
            make_error(error.kind(), join("with rank ", peer, ": ", error.what()), blame));
      }
    }
    const auto fetch = [&](const char* name) {
      return std::move(
          fetch_segment(introductions_[0].card.address, token + name, trust.secret, deadline_, [&] {
            look_for_failure();
            check_hope();
          }).fd);
    };
    if (rank_ != 0) {
      segments_.group = SharedSegment::map(
          fetch("/group"), round_up(GroupSegment::bytes(size_, chunk_bytes_), page_bytes()));
      segments_.messages = SharedSegment::map(fetch("/messages"),
                                              round_up(MessageSegment::bytes(size_), page_bytes()));
      segments_.heap = SharedFile(fetch("/heap"));
    }
    reserve_own();
  }

  void create_segments() {
    segments_.group = SharedSegment::create("group", GroupSegment::bytes(size_, chunk_bytes_));
    segments_.messages = SharedSegment::create("messages", MessageSegment::bytes(size_));
    segments_.heap = SharedFile::create("heap");
  }

  void reserve_own() {
    GroupSegment(segments_.group, size_, chunk_bytes_).reserve_control(rank_);
    MessageSegment(segments_.messages, size_).reserve_counters(rank_);
  }

  KeyValueStore& store_;
  const int rank_;
  const int size_;
  const NativeOptions& options_;
  const std::string topic_;
  const std::size_t chunk_bytes_;
  const Deadline deadline_;
  NativeMembership membership_;
  Segments segments_;
  std::vector<Introduction> introductions_;
  std::optional<JobSecret> made_secret_;   // rank 0's, where nobody gave one
  std::optional<SecretFile> secret_file_;  // until everybody has read it, or nobody will
  std::exception_ptr interruption_;        // by the user, amid the meeting
  Deadline next_look_ = Deadline::in(kNewsInterval);
  bool has_other_failed_ = false;
};

}  // namespace

NativeMembership meet_group(KeyValueStore& store, int rank, int size, const NativeOptions& options,
                            std::shared_ptr<Endpoint> endpoint) {
  return Meeting(store, rank, size, options, std::move(endpoint)).hold();
}

void decline_native_group(KeyValueStore& store, int rank, const std::string& name) noexcept {
  decline(store, introduction_topic(name), rank);
}

}  // namespace pydist
