#include "communicator/native/endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "topology/hosts.h"
#include "topology/rendezvous.h"

namespace pydist {
namespace {

constexpr const char* kPageKey = "page";

std::mutex process_mutex;
std::shared_ptr<Endpoint>& process_endpoint() {
  // Never destroyed: at exit the threads of a process that forgot to shut down must not be joined
  // from a static destructor.
  static auto& endpoint = *new std::shared_ptr<Endpoint>;
  return endpoint;
}

// Those that exist in this process.
struct Registry {
  std::mutex mutex;
  std::set<Endpoint*> all;  // guarded by mutex
};
Registry& registry() {
  static auto& the_registry = *new Registry;
  return the_registry;
}

}  // namespace

std::string Card::to_text() const {
  std::ostringstream cpus;
  for (const int processor : processors) {
    cpus << processor << ' ';
  }
  return pack({address, host_identity, host_name, std::to_string(pid), cpus.str(),
               processor_quota ? std::to_string(*processor_quota) : ""});
}

Card Card::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 6);
  Card card;
  card.address = parts[0];
  card.host_identity = parts[1];
  card.host_name = parts[2];
  card.pid = static_cast<pid_t>(std::stol(parts[3]));
  std::istringstream cpus(parts[4]);
  for (int processor = 0; cpus >> processor;) {
    card.processors.push_back(processor);
  }
  if (!parts[5].empty()) {
    card.processor_quota = std::stod(parts[5]);
  }
  return card;
}

Endpoint::Endpoint(const Environment& environment)
    : environment_(environment),
      host_identity_(host_identity(environment.host_id)),
      segment_(SharedSegment::create("process", sizeof(ProcessPage))),
      deaths_(std::make_shared<std::atomic<std::uint64_t>>(0)) {
  segment_.reserve(0, segment_.bytes(), "the page of a process");
  page_ = reinterpret_cast<ProcessPage*>(segment_.data());
  // The doorbell lives as long as the mapping, which the progress thread keeps.
  auto mapping = std::make_shared<SharedSegment>(segment_);
  progress_ = std::make_shared<Progress>(std::shared_ptr<Doorbell>(mapping, &page_->doorbell),
                                         std::chrono::nanoseconds::zero());
  const std::lock_guard lock(registry().mutex);
  registry().all.insert(this);
}

Endpoint::~Endpoint() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().all.erase(this);
  }
  progress_->stop();
  monitor_.reset();
  depart();
}

// Note [Departed or dead]
// A peer that finds this process gone looks at its page to tell an orderly end from a crash. The
// destructor marks the page. So does the end of the process, for all endpoints, because a holder of
// a group holds its endpoint, too: torch 2.14 holds groups until no destructor runs any more. The
// shutdown of one group does not mark the page: the process may still crash in another group.
void Endpoint::depart() noexcept {
  if (!birth_.is_inherited()) {
    page_->has_departed.store(1, std::memory_order_release);
  }
}

void Endpoint::depart_all() noexcept {
  const std::lock_guard lock(registry().mutex);
  for (Endpoint* const endpoint : registry().all) {
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
  }
  return endpoint;
}

void Endpoint::release_process() noexcept {
  std::shared_ptr<Endpoint> released;  // destroyed after the lock is given back
  const std::lock_guard lock(process_mutex);
  released.swap(process_endpoint());
}

SegmentServer& Endpoint::server() {
  const std::lock_guard lock(mutex_);
  if (!server_) {
    server_ = std::make_unique<SegmentServer>();
    server_->offer(kPageKey, segment_.fd());
    monitor_ = std::make_unique<Monitor>(*page_, environment_.heartbeat_warning);
    monitor_->watch_readable(server_->fd(), [server = server_.get()] { server->serve(); });
  }
  return *server_;
}

Card Endpoint::card() {
  Card card;
  card.address = server().address();
  card.host_identity = host_identity_;
  card.host_name = host_name();
  card.pid = ::getpid();
  card.processors = allowed_processors();
  card.processor_quota = processor_quota();
  return card;
}

void Endpoint::limit_spin(std::chrono::nanoseconds spin) {
  const std::lock_guard lock(mutex_);
  spin_ = std::min(spin, spin_.value_or(spin));
  progress_->set_spin(*spin_);
}

PeerPtr Endpoint::meet(const Card& card, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = peers_.find(card.address); known != peers_.end()) {
      return known->second;
    }
  }
  auto peer = std::make_shared<Peer>();
  peer->description = join("pid ", card.pid, " on host ", card.host_name);
  if (server().address() == card.address) {
    peer->segment = segment_;
  } else {
    FetchedSegment fetched = fetch_segment(card.address, kPageKey, deadline);
    peer->segment = SharedSegment::map(std::move(fetched.fd), segment_.bytes());
    peer->page = reinterpret_cast<ProcessPage*>(peer->segment.data());
    monitor_->watch_peer(fetched.server_pid,
                         {peer->description, peer->page, peer,
                          [peer = peer.get(), deaths = deaths_, doorbell = &page_->doorbell] {
                            peer->is_dead.store(true, std::memory_order_release);
                            deaths->fetch_add(1, std::memory_order_release);
                            doorbell->ring();
                          }});
  }
  peer->page = reinterpret_cast<ProcessPage*>(peer->segment.data());
  const std::lock_guard lock(mutex_);
  return peers_.try_emplace(card.address, std::move(peer)).first->second;
}

}  // namespace pydist
