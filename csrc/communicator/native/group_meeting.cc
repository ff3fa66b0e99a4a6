// The file is long because a meeting is one conversation, whose steps share all that is known so
// far.

#include "communicator/native/group_meeting.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"
#include "base/log.h"
#include "communicator/peers/first_connections.h"
#include "communicator/peers/group_memory.h"
#include "communicator/peers/introduction.h"
#include "communicator/peers/meeting_secret.h"
#include "communicator/peers/own_introduction.h"
#include "communicator/peers/roster.h"
#include "health/known_processes.h"
#include "health/long_wait.h"
#include "memory/memory_room.h"
#include "memory/segment_exchange.h"
#include "topology/hosts.h"
#include "topology/rendezvous.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

std::string topic_of(const std::string& name) { return "pydist/" + name; }
std::string introduction_topic(const std::string& name) { return topic_of(name) + "/introduction"; }

// How often a rank that waits for another one to answer looks whether anybody has failed, at most.
constexpr std::chrono::milliseconds kNewsInterval{50};
// How long any news takes to reach all ranks.
constexpr std::chrono::milliseconds kNewsGrace{1'000};
// How often it looks at the memory that it shares with that rank: first, and in the long run.
constexpr std::chrono::microseconds kFirstLook{20};
constexpr std::chrono::microseconds kLongestLook{5'000};

// The verdict on a group that stands. No complaint is like it.
constexpr const char* kStands = "stands";

class Meeting {
 public:
  Meeting(KeyValueStore& store, int rank, int size, const NativeOptions& options,
          Introduced introduced)
      : store_(store),
        rank_(rank),
        size_(size),
        options_(options),
        processes_(options.processes.empty() ? strangers(size) : options.processes),
        topic_(topic_of(options.name)),
        chunk_bytes_(round_up(
            std::max(options.environment.chunk_bytes, GroupSegment::least_chunk_bytes(size)),
            page_bytes())),
        deadline_(Deadline::in(options.environment.timeout)),
        introduced_(std::move(introduced)) {
    PYDIST_CHECK(processes_.size() == static_cast<std::size_t>(size));
    KnownProcess& own = processes_[static_cast<std::size_t>(rank)];
    own.host = host_name();
    own.pid = own.local_pid = ::getpid();
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting() {
    if (introduced_.own) {
      introduced_.own->end();
    }
  }

  NativeMembership hold() {
    if (size_ == 1) {
      stay_alone();
    } else {
      meet();
      membership_.endpoint->limit_spin(
          options_.environment.spin_time(host_roster_.has_core_for_every_rank));
    }
    membership_.group_segment = memory_.group();
    note_readable_processes();
    membership_.message_segment = memory_.messages();
    membership_.heap_file = memory_.heap();
    return std::move(membership_);
  }

 private:
  // Once the group stands, so that all have said whether they can read the others.
  void note_readable_processes() {
    for (int rank = 0; rank < size_; ++rank) {
      if (membership_.group_segment.control(rank).reads_processes.load() == 0) {
        membership_.processes.clear();
        return;
      }
      membership_.processes.push_back(membership_.peers[static_cast<std::size_t>(rank)]->memory());
    }
  }

  void meet() {
    const auto show_awaiting_nobody = [endpoint = &membership_.endpoint] {
      if (*endpoint) {
        (*endpoint)->show_awaiting_nobody();
      }
    };
    try {
      introduce();
      // Ranks that came at different times are here at the same time: so whoever waits for another
      // one that waits itself is not the first to give up.
      deadline_ = Deadline::in(options_.environment.timeout);
      if (placement().spans_hosts()) {
        introduce_to_hosts();
      }
      share_or_fail();
    } catch (const Timeout&) {
      // Goes on to show it: ranks that wait for this one come to their own deadlines about now.
      throw;
    } catch (...) {
      show_awaiting_nobody();
      throw;
    }
    show_awaiting_nobody();
  }

  // Note [One verdict]
  // Whether the group stands is settled once, under one key in the store: by rank 0, when it has
  // heard of all hosts that their ranks share memory, or before that by the first rank that fails.
  // A rank that waits for another one looks there now and then. So all ranks come to the same end,
  // and nobody waits any longer for a rank that has died or is stopped once any rank has failed.
  void share_or_fail() {
    std::vector<SegmentOffer> offers;  // until everybody has them, or nobody will
    try {
      share(offers);
      wait_for_verdict();
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      // What has come to its end (descriptors, say) may be needed to tell the others.
      offers.clear();
      memory_ = no_memory();
      membership_.remote.reset();
      if (const auto network = membership_.endpoint->network(); network && !roster_.ranks.empty()) {
        network->no_longer_expect(roster_.token);
      }
      tell(error);
      if (interruption_ != nullptr) {
        std::rethrow_exception(interruption_);
      }
      std::rethrow_exception(failure_ != nullptr ? failure_ : error_of(complaint_about(error)));
    }
  }

  [[nodiscard]] const KnownProcess& process(int rank) const {
    return processes_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] ErrorDescription lateness_of(const std::vector<int>& ranks) const {
    return lateness(processes_, options_.name, ranks);
  }
  [[noreturn]] void throw_lateness_of(int rank) const {
    ErrorDescription late = lateness_of({rank});
    throw Timeout(late.message, std::move(late.blame));
  }

  // Returns where the group stands.
  void wait_for_verdict() {
    std::atomic<MeetingStage>& stage = memory_.group().stage(rank_);
    try {
      noting_interruption(interruption_, [&] { hear_verdict(stage); });
    } catch (...) {
      if (interruption_ != nullptr || failure_ != nullptr) {
        throw;
      }
      // What is settled counts, also where whoever was to tell it has died meanwhile.
      if (rank_ == leader() || !has_come(leader(), MeetingStage::kStands)) {
        stand_or_tell(std::current_exception());
      }
    }
    if (rank_ == leader()) {
      stage.store(MeetingStage::kStands, std::memory_order_release);
    }
  }

  // The ranks of a host tell each other in the memory that they share by then, and the lowest of
  // each host tells rank 0 through the store.
  void hear_verdict(std::atomic<MeetingStage>& stage) {
    if (rank_ != leader()) {
      stage.store(MeetingStage::kShares, std::memory_order_release);
      // So long that the leader, which waits for rank 0, is the first to give up.
      wait_for_stage(leader(), MeetingStage::kStands, in_grace(kGraceAfterRankZero + kNewsGrace));
      return;
    }
    for (const int peer : placement().ranks_on(own_host())) {
      if (peer != rank_) {
        wait_for_stage(peer, MeetingStage::kShares, deadline_);
      }
    }
    const auto leader_key = [this](int rank) { return join(topic_, "/joined/", rank); };
    if (rank_ != 0) {
      store_.set(leader_key(rank_), "");
      require_standing(hear(verdict_key(), in_grace(kGraceAfterRankZero), 0));
      return;
    }
    // So long that a leader that waits for a rank of its host, and knows which, gives up first.
    const Deadline patient = in_grace(kNewsGrace);
    for (int host = 1; host < placement().hosts(); ++host) {
      const std::string key = leader_key(placement().leader_of(host));
      static_cast<void>(hear(key, patient, placement().leader_of(host)));
      store_.erase(key);
    }
    require_standing(store_.settle(verdict_key(), kStands));
  }

  std::string hear(const std::string& key, Deadline deadline, int awaited) {
    try {
      std::string found =
          get_while_hoping(store_, key, deadline, [this, awaited] { check_hope(awaited); });
      // Noted by the last look, which has found the key all the same.
      rethrow_if_any(interruption_);
      return found;
    } catch (const Timeout&) {
      throw_lateness_of(awaited);
    }
  }

  // Whether a rank of this host has come so far.
  [[nodiscard]] bool has_come(int rank, MeetingStage stage) const {
    return memory_.group().stage(rank).load(std::memory_order_acquire) >= stage;
  }

  // Until it has, or the store says that the group stands.
  void wait_for_stage(int rank, MeetingStage stage, Deadline deadline) {
    std::chrono::microseconds pause = kFirstLook;
    while (!has_come(rank, stage) && !stands_) {
      check_hope(rank);
      if (deadline.has_passed()) {
        throw_lateness_of(rank);
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestLook);
    }
  }

  [[nodiscard]] Deadline in_grace(std::chrono::milliseconds grace) const {
    return deadline_.is_never() ? deadline_ : Deadline::at(deadline_.when() + grace);
  }

  [[nodiscard]] std::string verdict_key() const { return topic_ + "/verdict"; }
  void require_standing(const std::string& verdict) {
    if (verdict != kStands) {
      failure_ = error_of(verdict);
      std::rethrow_exception(failure_);
    }
    stands_ = true;
  }

  // Makes `error` the verdict, unless there is one, and throws that; returns where the group
  // stands.
  void stand_or_tell(const std::exception_ptr& error) {
    std::string verdict;
    try {
      noting_interruption(interruption_,
                          [&] { verdict = store_.settle(verdict_key(), complaint_about(error)); });
    } catch (...) {
      rethrow_if_any(interruption_);
      std::rethrow_exception(error);  // the store is gone: nobody can be told
    }
    require_standing(verdict);
  }

  // Makes `error` the verdict, unless there is one.
  void tell(const std::exception_ptr& error) noexcept {
    try {
      if (failure_ == nullptr) {
        const std::string verdict = store_.settle(verdict_key(), complaint_about(error));
        failure_ = verdict == kStands ? nullptr : error_of(verdict);
      }
    } catch (...) {
      // The store is gone: nobody can be told.
    }
  }

  // What all ranks throw because of an error of this one, as text; and that text as an error.
  [[nodiscard]] std::string complaint_about(const std::exception_ptr& error) const {
    ErrorDescription what = describe(error);
    if (interruption_ != nullptr) {
      what.kind = ErrorKind::kAborted;
      what.message = join("it was interrupted (", kWhatInterrupts, ").");
      what.blame = process(rank_).blame("was interrupted");
    } else if (what.kind != ErrorKind::kPeerLost && what.kind != ErrorKind::kTimeout) {
      what.kind = ErrorKind::kTransport;
      if (what.blame.ranks.empty()) {
        what.blame = process(rank_).blame(what.message);
      }
    }
    // A lateness says all of that itself.
    if (what.kind != ErrorKind::kTimeout) {
      // The number of the rank that tells it would be taken for the culprit's.
      const std::vector<int>& guilty = what.blame.ranks;
      const bool is_own = guilty.empty() || guilty == std::vector<int>{process(rank_).rank};
      what.message = join("The ranks of group '", options_.name, "' cannot ",
                          placement().spans_hosts() ? "be joined: " : "share memory: ",
                          is_own ? process(rank_).who() + ": " : "", words_of(what.message),
                          on_numbers(processes_));
    }
    return ToldError{rank_, what}.to_text();
  }
  static std::exception_ptr error_of(const std::string& complaint) {
    const ErrorDescription told = ToldError::from_text(complaint).error;
    return make_error(told.kind, told.message, told.blame);
  }

  // Of a wait for that rank: ends it where it is in vain, or where the user interrupts it. One that
  // lasts is told of.
  void check_hope(int awaited) {
    show_awaited(awaited);
    warn_if_long(awaited);
    require_running_in_grace(awaited);
    if (next_look_.has_passed()) {
      next_look_ = Deadline::in(news_interval());
      noting_interruption(interruption_, [this] { look_for_verdict(); });
    }
    if (options_.check_hope) {
      options_.check_hope();
    }
    for (std::size_t rank = 0; rank < membership_.peers.size(); ++rank) {
      const Peer& peer = *membership_.peers[rank];
      if (peer.has_crashed()) {
        const KnownProcess& lost = process(static_cast<int>(rank));
        const std::string cause =
            peer.loss.empty() ? "has died" : join("can't be reached any more (", peer.loss, ")");
        throw PeerLost(join(lost.who(), " ", cause, " before the group was made."),
                       lost.blame(cause));
      }
    }
    noting_interruption(interruption_, &check_interruption);
  }
  // Rank 0 gets more time than the others to say who was missing; if it can't, no more.
  void require_running_in_grace(int awaited) const {
    if (deadline_.has_passed() && process(awaited).state() == ProcessState::kStopped) {
      throw_lateness_of(awaited);
    }
  }
  void warn_if_long(int awaited) {
    if (!long_wait_.is_due(options_.long_wait)) {
      return;
    }
    const std::string_view plight = in_words(process(awaited).state());
    std::string why = join("it waits for ", process(awaited).who(), ", which ");
    if (!plight.empty()) {
      why += plight;
    } else if (!roster_.ranks.empty()) {
      why += "has not shared memory yet, or waits itself for one that has not";
    } else {
      why += awaited == 0 ? "has not come, or waits itself for one that has not" : "has not come";
    }
    log_line(LogLevel::kWarning, long_wait_text(process(rank_).who(),
                                                join("the meeting of group '", options_.name, "'"),
                                                options_.long_wait, why + on_numbers(processes_)));
  }
  // For peers that wait for this rank in another group.
  void show_awaited(int rank) {
    if (membership_.endpoint) {  // it could be made
      const KnownProcess& its = process(rank);
      membership_.endpoint->show_awaited(options_.name, rank, its.host, its.pid);
    }
  }
  // Some thousand ranks together ask for news ten thousand times a second.
  [[nodiscard]] std::chrono::milliseconds news_interval() const {
    return std::max(kNewsInterval, std::chrono::milliseconds(size_ / 10));
  }
  void look_for_verdict() {
    if (const std::optional<std::string> verdict = look_up(store_, verdict_key())) {
      require_standing(*verdict);
    }
  }

  void stay_alone() {
    membership_.endpoint =
        introduced_.endpoint ? introduced_.endpoint : Endpoint::of_process(options_.environment);
    membership_.endpoint_use = EndpointUse(membership_.endpoint);
    Endpoint& endpoint = *membership_.endpoint;
    memory_.create(Placement(1), 0);
    memory_.reserve(rank_, Placement(1));
    auto self = std::make_shared<Peer>();
    self->host = host_name();
    self->pid = self->local_pid = ::getpid();
    self->description = name_of_process(self->pid, self->host);
    self->page = &endpoint.page();
    self->doorbell = &endpoint.doorbell();
    membership_.peers.push_back(std::move(self));
    membership_.memory_limits.push_back(memory_limits());
  }

  // Tells the others who this rank is, or why it cannot take part; unless all have been told.
  void introduce() {
    if (!introduced_.own) {
      introduced_.own = std::make_shared<OwnIntroduction>(
          rank_, options_.environment, options_.secret, std::move(introduced_.endpoint));
    }
    OwnIntroduction& own = *introduced_.own;
    membership_.endpoint = own.endpoint();
    membership_.endpoint_use = own.take_use();
    if (!introduced_.roster) {
      const auto make_roster = [&](const std::vector<std::string>& texts) {
        return make_native_roster(own, store_, options_.name, texts, processes_);
      };
      introduced_.roster = hear_roster(introduction_topic(options_.name), own.text(), make_roster);
    }
    roster_ = Roster::from_text(*introduced_.roster);
    PYDIST_CHECK(membership_.endpoint && placement().size() == size_);
    for (std::size_t rank = 0; rank < roster_.ranks.size(); ++rank) {
      processes_[rank].host = roster_.ranks[rank].host_name;
      processes_[rank].pid = roster_.ranks[rank].pid;
    }
  }

  // What rank 0 makes of what each rank says under `topic`.
  [[nodiscard]] std::string hear_roster(const std::string& topic, const std::string& mine,
                                        const Summarize& summarize) {
    const auto hope = [this](int awaited) {
      show_awaited(awaited);
      warn_if_long(awaited);
      require_running_in_grace(awaited);
      if (options_.check_hope) {
        options_.check_hope();
      }
    };
    return exchange(store_, topic, rank_, size_, mine, summarize, deadline_, hope,
                    [this](const auto& ranks) { return lateness_of(ranks); });
  }

  // Once it is known that the ranks are on several hosts: tells the others how this one is reached.
  void introduce_to_hosts() {
    NetworkIntroduction mine;
    try {
      mine.card = membership_.endpoint->open_network(options_.address)->card();
    } catch (const std::exception& error) {
      mine.complaint = words_of(error.what());
    }
    mine.secret = secret().to_tell();
    if (!mine.secret.empty()) {
      log_line(LogLevel::kWarning,
               "The ranks are on several hosts and PYDIST_JOB_SECRET is not set, so they share a "
               "secret through the job's store, where everybody who reaches it can read it.");
    }
    const auto make_roster = [this](const std::vector<std::string>& texts) {
      return NetworkRoster::of(texts, processes_, options_.name).to_text();
    };
    network_roster_ =
        NetworkRoster::from_text(hear_roster(topic_ + "/network", mine.to_text(), make_roster));
    PYDIST_CHECK(network_roster_.cards.size() == static_cast<std::size_t>(size_));
    if (!network_roster_.secret.empty()) {
      secret().hear(network_roster_.secret);
    }
  }

  [[nodiscard]] MeetingSecret& secret() { return introduced_.own->secret(); }
  [[nodiscard]] GroupMemory no_memory() const { return {size_, chunk_bytes_}; }

  // -- by host ----------------------------------------------------------------------------------
  [[nodiscard]] const Placement& placement() const { return roster_.placement; }
  [[nodiscard]] int own_host() const { return placement().host_of(rank_); }
  [[nodiscard]] int leader() const { return placement().leader_of(own_host()); }
  // That of a rank of this host.
  [[nodiscard]] const Card& card_of(int rank) const {
    return host_roster_.cards[static_cast<std::size_t>(placement().index_on_host(rank))];
  }

  // Gets what the group is made of, and backs this rank's part of it with memory.
  void share(std::vector<SegmentOffer>& offers) {
    Endpoint& endpoint = *membership_.endpoint;
    const std::string& token = roster_.token;
    const Trust trust{token, secret().get(roster_.secret_folder, token).derive(token)};
    membership_.secret = std::make_shared<const JobSecret>(trust.secret.derive("splits"));
    offers = endpoint.receive(trust);
    const bool spans_hosts = placement().spans_hosts();
    if (spans_hosts) {
      endpoint.network()->expect(token, trust.secret);
    }
    if (rank_ == leader()) {
      memory_.create(placement(), own_host());
      for (SegmentOffer& offer : memory_.offer(endpoint.server(), token, trust.secret)) {
        offers.push_back(std::move(offer));
      }
    }
    noting_interruption(interruption_, [this] {
      host_roster_ =
          roster_of_host(store_, introduction_topic(options_.name), roster_, own_host(), deadline_);
    });
    PYDIST_CHECK(host_roster_.cards.size() == placement().ranks_on(own_host()).size());
    MemoryRequests asked = ask_for_memory(trust);
    meet_peers(trust);
    if (rank_ != leader()) {
      fetch_memory(asked);
    }
    memory_.reserve(rank_, placement());
    if (spans_hosts) {
      join_hosts(token);
    } else if (options_.environment.single_copy && reads_all_processes()) {
      memory_.group().control(rank_).reads_processes.store(1);
    }
  }

  [[nodiscard]] bool reads_all_processes() const {
    for (const PeerPtr& peer : membership_.peers) {
      if (const int error = peer->memory().obstacle(); error != 0) {
        log_line(
            LogLevel::kInfo,
            join("The ranks of group '", options_.name,
                 "' do not read each other's memory through the kernel: this process can't read ",
                 peer->description, " (", std::strerror(error), ")."));
        return false;
      }
    }
    return true;
  }

  // Note [Asking ahead]
  // What a rank needs of others takes a turn of a thread of theirs each time, which on a busy host
  // is long in coming. So it asks for all of it before it waits for any: for the group's memory,
  // and for what it takes to meet the next few peers.
  using MemoryRequests = std::map<std::string, SegmentRequest>;
  [[nodiscard]] MemoryRequests ask_for_memory(const Trust& trust) const {
    MemoryRequests asked;
    if (rank_ != leader()) {
      for (const std::string name : GroupMemory::names(placement())) {
        asked.emplace(name,
                      SegmentRequest(card_of(leader()).address, trust.token + name, trust.secret));
      }
    }
    return asked;
  }

  void meet_peers(const Trust& trust) {
    constexpr int kAskedAhead = 16;  // each takes two descriptors until it is met
    Endpoint& endpoint = *membership_.endpoint;
    std::deque<std::optional<PeerRequest>> asked;  // from `peer` on
    for (int peer = 0; peer < size_; ++peer) {
      while (asked.size() < kAskedAhead && peer + static_cast<int>(asked.size()) < size_) {
        const int next = peer + static_cast<int>(asked.size());
        asked.push_back(placement().share_host(next, rank_) ? endpoint.ask(card_of(next), trust)
                                                            : std::nullopt);
      }
      const auto place = static_cast<std::size_t>(peer);
      with(peer, [&] {
        membership_.peers.push_back(
            placement().share_host(peer, rank_)
                ? endpoint.meet(card_of(peer), std::move(asked.front()), deadline_,
                                [this, peer] { check_hope(peer); })
                : endpoint.meet_over_network(roster_.ranks[place], network_roster_.cards[place],
                                             trust));
      });
      asked.pop_front();
      processes_[place].local_pid = membership_.peers.back()->local_pid;
    }
    for (const Card& card : host_roster_.cards) {
      membership_.memory_limits.push_back(card.memory_limits);
    }
  }

  void fetch_memory(MemoryRequests& asked) {
    const int first = leader();
    memory_.fetch(placement(), own_host(), [&](const char* name) {
      return with(first, [&] {
        return std::move(asked.at(name).await(deadline_, [this, first] { check_hope(first); }).fd);
      });
    });
  }

  void join_hosts(const std::string& token) {
    membership_.remote = std::make_shared<RemoteRanks>(
        rank_, placement(), number_of_token(token), token, *membership_.endpoint, memory_.group(),
        RemoteRanks::Lanes{memory_.messages(), memory_.collectives()}, membership_.peers);
    const std::vector<NodeCard>& cards = network_roster_.cards;
    const bool are_on_one_machine =
        std::all_of(cards.begin(), cards.end(), [&cards](const NodeCard& each) {
          return !each.machine.empty() && each.machine == cards.front().machine;
        });
    membership_.rounds =
        rounds_settings(options_.environment, placement().hosts(), are_on_one_machine);
    FirstConnections connections(*membership_.endpoint->network(), rank_, placement(),
                                 membership_.peers, deadline_);
    connections.wait([this](int peer) { check_hope(peer); }, processes_, network_roster_.cards);
  }

  // What does not know the ranks, and deals with one.
  template <typename Function>
  auto with(int peer, const Function& function) -> decltype(function()) {
    try {
      return function();
    } catch (const Error& error) {
      if (!error.blame().ranks.empty()) {
        throw;
      }
      if (error.kind() == ErrorKind::kTimeout) {
        throw_lateness_of(peer);
      }
      Blame blame = error.blame();
      if (blame.pid != 0) {
        blame.ranks = {process(peer).rank};
      }
      std::rethrow_exception(
          make_error(error.kind(), join("with ", process(peer).who(), ": ", error.what()), blame));
    }
  }

  KeyValueStore& store_;
  const int rank_;
  const int size_;
  const NativeOptions& options_;
  KnownProcesses processes_;  // by rank; more of them from the roster on
  const std::string topic_;
  const std::size_t chunk_bytes_;
  Deadline deadline_;
  Introduced introduced_;
  NativeMembership membership_;
  GroupMemory memory_ = no_memory();
  Roster roster_;                 // empty until the ranks have introduced themselves
  NetworkRoster network_roster_;  // empty on one host
  HostRoster host_roster_;
  std::exception_ptr interruption_;  // by the user, amid the meeting
  std::exception_ptr failure_;       // of all ranks, once it is settled
  bool stands_ = false;              // the group, by the verdict
  Deadline next_look_ = Deadline::in(news_interval());
  LongWait long_wait_;
};

}  // namespace

NativeMembership meet_group(KeyValueStore& store, int rank, int size, const NativeOptions& options,
                            Introduced introduced) {
  return Meeting(store, rank, size, options, std::move(introduced)).hold();
}

std::string make_native_roster(OwnIntroduction& own, KeyValueStore& store, const std::string& name,
                               const std::vector<std::string>& introductions,
                               KnownProcesses& processes) {
  const std::vector<Introduction> ranks = read_introductions(introductions, processes, name);
  std::string secret_folder;
  try {
    secret_folder = own.secret().make(ranks[0].token);
  } catch (const TransportError& error) {
    throw TransportError(join(processes[0].who(), " cannot take part in group '", name,
                              "': ", error.what(), on_numbers(processes)),
                         processes[0].blame(error.what()));
  }
  return hand_out(store, introduction_topic(name), ranks, secret_folder).to_text();
}

ErrorDescription decline_native_group(KeyValueStore& store, const std::string& name,
                                      const ErrorDescription& why) {
  return decline(store, introduction_topic(name), why);
}

std::optional<ErrorDescription> native_group_declined(KeyValueStore& store,
                                                      const std::string& name) {
  return declined(store, introduction_topic(name));
}

}  // namespace pydist
