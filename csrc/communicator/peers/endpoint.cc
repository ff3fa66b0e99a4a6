#include "communicator/peers/endpoint.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <iterator>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "communicator/peers/remote_ranks.h"
#include "health/journal.h"
#include "memory/job_secret.h"
#include "memory/memory_room.h"
#include "topology/hosts.h"

namespace pydist {
namespace {

std::string page_key(const std::string& token, const std::string& address) {
  return join(token, "/page of ", address);
}
std::string doorbell_key(const std::string& token, const std::string& address) {
  return join(token, "/doorbell of ", address);
}

std::string pid_namespace() {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string();
}

// Whether a process that has not been met yet is still there, as far as can be told. Its socket may
// outlive it: a process that it forked holds it open.
class Stranger {
 public:
  explicit Stranger(const Card& card) {
    if (!card.pid_namespace.empty() && card.pid_namespace == pid_namespace()) {
      pidfd_ = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, card.pid, 0)));
      was_gone_ = !pidfd_ && errno == ESRCH;
    }
  }

  [[nodiscard]] bool is_gone() const {
    pollfd ends{pidfd_.get(), POLLIN, 0};
    return was_gone_ || (pidfd_ && ::poll(&ends, 1, 0) > 0);
  }

 private:
  FileDescriptor pidfd_;
  bool was_gone_ = false;
};

std::mutex process_mutex;
int process_rank = -1;  // guarded by process_mutex; in the job
std::shared_ptr<Endpoint>& process_endpoint() {
  // Never destroyed: at exit the threads of a process that forgot to shut down must not be joined
  // from a static destructor.
  static auto& endpoint = *new std::shared_ptr<Endpoint>;
  return endpoint;
}

// Those that exist in this process.
struct Endpoints {
  std::mutex mutex;
  std::set<Endpoint*> all;  // guarded by mutex
};
Endpoints& endpoints() {
  static auto& the_endpoints = *new Endpoints;
  return the_endpoints;
}

}  // namespace

// Takes the frames that are for the process itself: signs of life, and the last one.
class Endpoint::ProcessFrames final : public FrameSink {
 public:
  void add(const PeerPtr& peer) {
    const std::lock_guard lock(mutex_);
    peers_.insert_or_assign(peer->link->number(), peer);
  }

 private:
  std::byte* place(const FrameHeader& header, std::uint64_t /*sender*/) override {
    if (header.bytes != 0 ||
        (header.kind != FrameKind::kHeartbeat && header.kind != FrameKind::kGoodbye)) {
      throw BadFrame(join("a frame of kind ", static_cast<int>(header.kind), " for no group."));
    }
    return nullptr;
  }
  void take(const FrameHeader& header, const std::byte* /*payload*/,
            std::uint64_t sender) override {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(sender);
    if (found == peers_.end()) {
      return;
    }
    Peer& peer = *found->second;
    if (header.kind == FrameKind::kGoodbye) {
      peer.has_said_goodbye.store(true, std::memory_order_release);
    }
    peer.mirror->heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed);
  }
  void lose(std::uint64_t /*sender*/) override {}

  std::mutex mutex_;
  std::map<std::uint64_t, PeerPtr> peers_;  // by their link; guarded by mutex_
};

std::string Card::to_text() const {
  std::ostringstream cpus;
  for (const int processor : processors) {
    cpus << processor << ' ';
  }
  return pack({address, host_identity, host_name, std::to_string(pid), pid_namespace, memory_limits,
               cpus.str(), processor_quota ? std::to_string(*processor_quota) : "",
               std::to_string(page_number), machine});
}

Card Card::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 10);
  Card card;
  card.address = parts[0];
  card.host_identity = parts[1];
  card.host_name = parts[2];
  card.pid = static_cast<pid_t>(std::stol(parts[3]));
  card.pid_namespace = parts[4];
  card.memory_limits = parts[5];
  std::istringstream cpus(parts[6]);
  for (int processor = 0; cpus >> processor;) {
    card.processors.push_back(processor);
  }
  if (!parts[7].empty()) {
    card.processor_quota = std::stod(parts[7]);
  }
  card.page_number = std::stoull(parts[8]);
  card.machine = parts[9];
  return card;
}

Endpoint::Endpoint(const Environment& environment)
    : environment_(environment),
      host_identity_(host_identity(environment.host_id)),
      page_segment_(SharedSegment::create("process", sizeof(ProcessPage))),
      doorbell_segment_(SharedSegment::create("doorbell", sizeof(Doorbell))),
      deaths_(std::make_shared<std::atomic<std::uint64_t>>(0)) {
  page_segment_.reserve(0, page_segment_.bytes(), "the page of a process");
  page_segment_.refuse_further_writers();
  doorbell_segment_.reserve(0, doorbell_segment_.bytes(), "the doorbell of a process");
  page_ = reinterpret_cast<ProcessPage*>(page_segment_.data());
  page_->pid.store(::getpid(), std::memory_order_relaxed);
  page_->number.store(std::hash<std::string>()(random_token()), std::memory_order_relaxed);
  page_->number_address.store(reinterpret_cast<std::uintptr_t>(&page_->number),
                              std::memory_order_relaxed);
  // The doorbell lives as long as the mapping, which the progress thread keeps.
  auto mapping = std::make_shared<SharedSegment>(doorbell_segment_);
  progress_ = std::make_shared<ProgressThread>(
      std::shared_ptr<Doorbell>(mapping, reinterpret_cast<Doorbell*>(mapping->data())),
      std::chrono::nanoseconds::zero());
  const std::lock_guard lock(endpoints().mutex);
  endpoints().all.insert(this);
}

Endpoint::~Endpoint() {
  {
    const std::lock_guard lock(endpoints().mutex);
    endpoints().all.erase(this);
  }
  retire();
}

void Endpoint::retire() noexcept {
  if (birth_.is_inherited()) {
    return;  // the threads do not exist here, and one of them may have held the lock
  }
  std::unique_ptr<PeerDeathMonitor> monitor;
  std::unique_ptr<SegmentServer> server;  // destroyed after the monitor, which watches it
  std::shared_ptr<TcpNode> network;
  std::vector<std::shared_ptr<RemoteRanks>> still_serving;
  {
    const std::lock_guard lock(mutex_);
    monitor = std::move(monitor_);
    server = std::move(server_);
    network = network_;
    still_serving.swap(still_serving_);
  }
  progress_->stop();
  monitor.reset();
  depart();
  if (network) {
    network->stop();
  }
}

void Endpoint::begin_use() {
  const std::lock_guard lock(mutex_);
  if (is_released_ && uses_ == 0) {
    throw Aborted("This process has left its job, so it makes no more groups there.");
  }
  ++uses_;
}

void Endpoint::end_use() noexcept {
  if (birth_.is_inherited()) {
    return;  // the parent's
  }
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    is_last = --uses_ == 0 && is_released_;
  }
  if (is_last) {
    retire();
  }
}

EndpointUse::EndpointUse(std::shared_ptr<Endpoint> endpoint) {
  endpoint->begin_use();
  endpoint_ = std::move(endpoint);
}

void EndpointUse::end() noexcept {
  if (const std::shared_ptr<Endpoint> endpoint = std::exchange(endpoint_, nullptr)) {
    endpoint->end_use();
  }
}

// Note [Departed or dead]
// A peer that finds this process gone looks at its page to tell an orderly end from a crash. The
// process marks the page when it has let go of the endpoint and has closed the last group. So does
// its end, for all endpoints: torch 2.14 holds groups until no destructor runs any more. The
// shutdown of one group does not mark the page: the process may still crash in another group.
void Endpoint::depart() noexcept {
  if (!birth_.is_inherited()) {
    page_->has_departed.store(1, std::memory_order_release);
    if (const std::shared_ptr<TcpNode> node = network()) {
      node->say_goodbye();
    }
  }
}

void Endpoint::depart_all() noexcept {
  const std::lock_guard lock(endpoints().mutex);
  for (Endpoint* const endpoint : endpoints().all) {
    endpoint->depart();
  }
}

std::shared_ptr<Endpoint> Endpoint::of_process(const Environment& environment) {
  require_not_forked();
  const std::lock_guard lock(process_mutex);
  std::shared_ptr<Endpoint>& endpoint = process_endpoint();
  if (endpoint && endpoint->birth_.is_inherited()) {
    new std::shared_ptr<Endpoint>(std::move(endpoint));  // the parent's; nobody touches it here
    endpoint = nullptr;
  }
  if (!endpoint) {
    endpoint = std::make_shared<Endpoint>(environment);
    endpoint->page_->rank_plus_one.store(process_rank + 1, std::memory_order_relaxed);
  }
  return endpoint;
}

std::shared_ptr<Endpoint> Endpoint::of_process_if_any() {
  const std::lock_guard lock(process_mutex);
  const std::shared_ptr<Endpoint>& endpoint = process_endpoint();
  return endpoint && !endpoint->birth_.is_inherited() ? endpoint : nullptr;
}

void Endpoint::show_rank(int rank) noexcept {
  const std::lock_guard lock(process_mutex);
  process_rank = rank;
  const std::shared_ptr<Endpoint>& endpoint = process_endpoint();
  if (endpoint && !endpoint->birth_.is_inherited()) {
    endpoint->page_->rank_plus_one.store(rank + 1, std::memory_order_relaxed);
  }
}

void Endpoint::release_process() noexcept {
  std::shared_ptr<Endpoint> released;
  {
    const std::lock_guard lock(process_mutex);
    released.swap(process_endpoint());
  }
  if (released && !released->birth_.is_inherited()) {
    bool is_last = false;
    {
      const std::lock_guard lock(released->mutex_);
      released->is_released_ = true;
      is_last = released->uses_ == 0;
    }
    if (is_last) {
      released->retire();
    }
  }
}

SegmentServer& Endpoint::server() {
  const std::lock_guard lock(mutex_);
  if (!server_) {
    // Both or none: the system may have no descriptor or no thread to give.
    auto server = std::make_unique<SegmentServer>();
    auto monitor = std::make_unique<PeerDeathMonitor>(*page_, environment_.heartbeat_warning,
                                                      environment_.heartbeat_timeout);
    monitor->watch_readable(server->fd(), [served = server.get()] { served->serve(); });
    server_ = std::move(server);
    monitor_ = std::move(monitor);
  }
  return *server_;
}

Card Endpoint::card() {
  Card card;
  card.address = server().address();
  card.host_identity = host_identity_;
  card.host_name = host_name();
  card.machine = machine_identity();
  card.pid = ::getpid();
  card.pid_namespace = pid_namespace();
  card.memory_limits = memory_limits();
  card.processors = allowed_processors();
  card.processor_quota = processor_quota();
  card.page_number = page_->number.load(std::memory_order_relaxed);
  return card;
}

void Endpoint::limit_spin(std::chrono::nanoseconds spin) {
  const std::lock_guard lock(mutex_);
  spin_ = std::min(spin, spin_.value_or(spin));
  progress_->set_spin(*spin_);
}

std::vector<SegmentOffer> Endpoint::receive(const Trust& trust) {
  SegmentServer& server = this->server();
  std::vector<SegmentOffer> offers;
  offers.emplace_back(server, page_key(trust.token, server.address()), page_segment_.fd(),
                      trust.secret);
  offers.emplace_back(server, doorbell_key(trust.token, server.address()), doorbell_segment_.fd(),
                      trust.secret);
  return offers;
}

PeerPtr Endpoint::known_peer(const Card& card) {
  const std::lock_guard lock(mutex_);
  const auto known = peers_.find(card.address);
  return known == peers_.end() ? nullptr : known->second;
}

std::optional<PeerRequest> Endpoint::ask(const Card& card, const Trust& trust) {
  if (known_peer(card) || server().address() == card.address) {
    return std::nullopt;
  }
  return PeerRequest{{card.address, page_key(trust.token, card.address), trust.secret},
                     {card.address, doorbell_key(trust.token, card.address), trust.secret}};
}

PeerPtr Endpoint::meet(const Card& card, std::optional<PeerRequest> asked, Deadline deadline,
                       const CheckHope& check_hope) {
  if (PeerPtr known = known_peer(card)) {
    return known;
  }
  auto peer = std::make_shared<Peer>();
  peer->description = name_of_process(card.pid, card.host_name);
  peer->host = card.host_name;
  peer->pid = card.pid;
  if (!asked) {
    PYDIST_CHECK(server().address() == card.address);
    peer->page_segment = page_segment_;
    peer->doorbell_segment = doorbell_segment_;
    peer->page = page_;
    peer->doorbell = &doorbell();
    peer->local_pid = ::getpid();
  } else {
    progress_->note_peer_here();
    const Stranger stranger(card);
    const auto await = [&](SegmentRequest& request) {
      return request.await(deadline, [&] {
        if (stranger.is_gone()) {
          throw PeerLost(peer->description + " died before this process could meet it.",
                         Blame{.host = peer->host, .pid = peer->pid, .cause = "has died"});
        }
        if (check_hope) {
          check_hope();
        }
      });
    };
    FetchedSegment fetched = await(asked->page);
    peer->page_segment =
        SharedSegment::map(std::move(fetched.fd), page_segment_.bytes(), Access::kRead);
    peer->page = reinterpret_cast<const ProcessPage*>(peer->page_segment.data());
    peer->local_pid = fetched.server_pid;
    peer->doorbell_segment =
        SharedSegment::map(await(asked->doorbell).fd, doorbell_segment_.bytes());
    peer->doorbell = reinterpret_cast<Doorbell*>(peer->doorbell_segment.data());
    const auto report = [peer = peer.get(), deaths = deaths_, doorbell = &doorbell()] {
      peer->is_dead.store(true, std::memory_order_release);
      deaths->fetch_add(1, std::memory_order_release);
      doorbell->ring();
    };
    monitor_->watch_peer(fetched.server_pid,
                         {peer->description, peer->page, peer, report, [peer = peer.get(), report] {
                            peer->is_silent.store(true, std::memory_order_relaxed);
                            report();
                          }});
  }
  const std::lock_guard lock(mutex_);
  return peers_.try_emplace(card.address, std::move(peer)).first->second;
}

std::shared_ptr<TcpNode> Endpoint::open_network(const std::optional<std::string>& address) {
  const std::lock_guard lock(mutex_);
  if (!network_) {
    NetworkSettings settings = environment_.network;
    settings.address = address;
    network_ = std::make_shared<TcpNode>(settings, log_);
    frames_ = std::make_shared<ProcessFrames>();
    network_->add_sink(0, *frames_);
    progress_->set_network(network_);
  }
  return network_;
}

void Endpoint::keep_serving(std::shared_ptr<RemoteRanks> remote) {
  end_served();
  const std::lock_guard lock(mutex_);
  still_serving_.push_back(std::move(remote));
}

void Endpoint::end_served() {
  std::vector<std::shared_ptr<RemoteRanks>> over;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto first =
      std::partition(still_serving_.begin(), still_serving_.end(),
                     [](const std::shared_ptr<RemoteRanks>& each) { return each->is_needed(); });
  over.assign(std::make_move_iterator(first), std::make_move_iterator(still_serving_.end()));
  still_serving_.erase(first, still_serving_.end());
}

std::shared_ptr<TcpNode> Endpoint::network() {
  const std::lock_guard lock(mutex_);
  return network_;
}

PeerPtr Endpoint::meet_over_network(const Acquaintance& process, const NodeCard& node_card,
                                    const Trust& trust) {
  end_served();
  const std::lock_guard lock(mutex_);
  PeerPtr& peer = peers_[node_card.name];
  if (!peer) {
    peer = std::make_shared<Peer>();
    peer->description = name_of_process(process.pid, process.host_name);
    peer->host = process.host_name;
    peer->pid = process.pid;
    peer->mirror = std::make_unique<ProcessPage>();
    peer->mirror->number.store(process.page_number, std::memory_order_relaxed);
    peer->mute_doorbell = std::make_unique<Doorbell>();
    peer->page = peer->mirror.get();
    peer->doorbell = peer->mute_doorbell.get();
  }
  const auto on_loss = [peer = peer.get(), deaths = deaths_,
                        doorbell = &doorbell()](const std::string& why) {
    peer->loss = why;
    peer->is_dead.store(true, std::memory_order_release);
    deaths->fetch_add(1, std::memory_order_release);
    doorbell->ring();
  };
  LinkPtr link = network_->link_to(node_card, trust.token, trust.secret, on_loss);
  if (!peer->link) {  // from now on other threads read it, without a lock
    peer->link = std::move(link);
  }
  frames_->add(peer);
  return peer;
}

void Endpoint::show_awaited(const std::string& group, int rank, std::string_view host, int pid) {
  const std::lock_guard lock(mutex_);
  for (const auto& [address, peer] : peers_) {
    if (peer->pid == pid && peer->host == host && !peer->is_dead.load(std::memory_order_relaxed)) {
      page_->awaited.set(fingerprint_on_host(group), rank,
                         peer->page->number.load(std::memory_order_relaxed));
      return;
    }
  }
}

}  // namespace pydist
