#include "communicator/peers/remote_rank.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

::pydist::Placement placement() {
  return ::pydist::Placement(std::vector<std::string>{"a", "a", "b"});
}

}  // namespace

RemoteGround::RemoteGround(int rank, bool connects)
    : rank_(rank),
      token_(random_token()),
      secret_(JobSecret::random()),
      endpoint_(std::make_shared<Endpoint>([] {
        Environment environment = test_environment();
        environment.network.sockets = 1;
        return environment;
      }())) {
  const std::shared_ptr<TcpNode> node = endpoint_->open_network("127.0.0.1");
  node->expect(token_, secret_);
  far_ = connect("b", connects);
  segment_ = GroupSegment(
      SharedSegment::create("group", GroupSegment::bytes(kRemoteSize, kRemoteChunkBytes)),
      kRemoteSize, kRemoteChunkBytes);
  const LaneTable table(placement(), placement().host_of(rank_));
  const auto make = [&table](const char* name, const LaneShape& shape) {
    return LaneSegment(SharedSegment::create(name, LaneSegment::bytes(table, shape)), table, shape);
  };
  messages_ = make("messages", kMessageLanes);
  collectives_ = make("collectives", collective_lanes(Environment().chunk_bytes));
  for (int each = 0; each < kRemoteSize; ++each) {
    segment_.reserve_control(each);
    messages_.reserve_counters(each);
    collectives_.reserve_counters(each);
  }
  messages_.reserve_lane(rank_, kRemote);
  segment_.reserve_common();
  make_ranks();
}

void RemoteGround::make_ranks() {
  std::vector<PeerPtr> peers;
  for (int rank = 0; rank < kRemoteSize; ++rank) {
    auto here = std::make_shared<Peer>();
    here->description = join("pid ", rank, " on host a");
    here->host = "a";
    here->page = &endpoint_->page();
    here->doorbell = &endpoint_->doorbell();
    peers.push_back(rank == kRemote ? far_.peer : here);
  }
  remote_ =
      std::make_shared<RemoteRanks>(rank_, placement(), kRemoteGroup, token_, *endpoint_, segment_,
                                    RemoteRanks::Lanes{messages_, collectives_}, peers);
  health_ = std::make_unique<GroupHealth>("world", rank_, endpoint_, segment_, peers,
                                          std::chrono::minutes(1), remote_);
}

RemoteGround::~RemoteGround() {
  remote_->release_buffers();
  remote_->stop();
}

void RemoteGround::renew() {
  remote_->release_buffers();
  remote_->stop();
  health_ = nullptr;
  remote_ = nullptr;
  std::memset(static_cast<void*>(&segment_.failure()), 0, sizeof(FailureRecord));
  for (int rank = 0; rank < kRemoteSize; ++rank) {
    std::memset(static_cast<void*>(&segment_.control(rank)), 0, segment_.control_stride());
    for (int other = 0; other < kRemoteSize; ++other) {
      for (const LaneSegment* lanes : {&messages_, &collectives_}) {
        std::memset(static_cast<void*>(&lanes->counters(rank, other)), 0, sizeof(LaneCounters));
      }
    }
  }
  endpoint_->network()->expect(token_, secret_);
  far_ = connect("b");
  make_ranks();
}

FileDescriptor RemoteGround::connect_again() const {
  const NodeCard& card = endpoint_->network()->card();
  return connect_as({token_, far_.name, card.name}, secret_,
                    SocketAddress::from_text(card.addresses[0]));
}

RemoteGround::Process RemoteGround::connect(const std::string& host, bool connects) {
  Process process;
  process.name = random_token();
  const std::shared_ptr<TcpNode> node = endpoint_->network();
  process.peer = endpoint_->meet_over_network(
      {.host_name = host, .pid = 71}, {process.name, "", {"127.0.0.1 port 9"}}, {token_, secret_});
  if (!connects) {
    return process;
  }
  process.connection = connect_as({token_, process.name, node->card().name}, secret_,
                                  SocketAddress::from_text(node->card().addresses[0]));
  PYDIST_CHECK(process.connection && eventually([&] { return process.peer->link->is_up(); }));
  return process;
}

FrameHeader RemoteGround::header(FrameKind kind, std::uint64_t number) const {
  FrameHeader header;
  header.kind = kind;
  header.group = kRemoteGroup;
  header.sender = kRemote;
  header.receiver = rank_;
  header.number = number;
  return header;
}

bool RemoteGround::send(const FrameHeader& header, std::string_view payload) {
  return send_all(connection(), frame_text(header, payload));
}

std::optional<std::string> RemoteGround::receive(FrameKind kind) {
  for (const Deadline deadline = Deadline::in(std::chrono::seconds(20)); !deadline.has_passed();) {
    const std::string text = receive_all(connection(), sizeof(FrameHeader));
    if (text.size() != sizeof(FrameHeader)) {
      return std::nullopt;
    }
    FrameHeader header;
    std::memcpy(&header, text.data(), sizeof header);
    const std::string payload = receive_all(connection(), header.bytes);
    if (header.kind == kind) {
      return text + payload;
    }
  }
  return std::nullopt;
}

void RemoteGround::fill_link() {
  FrameHeader filling = header(FrameKind::kEager);
  filling.group = kRemoteGroup + 1;
  const std::vector<std::byte> bytes(std::size_t{16} << 20);
  link().send(filling, bytes);
}

std::string RemoteGround::memory_of_this_host() const {
  std::string text;
  const auto add = [&text](const void* memory, std::size_t bytes) {
    text.append(static_cast<const char*>(memory), bytes);
  };
  for (const int rank : {0, 1}) {
    add(&segment_.control(rank), segment_.control_stride());
    for (const LaneSegment* lanes : {&messages_, &collectives_}) {
      for (const int other : {0, 1}) {
        add(&lanes->counters(rank, other), sizeof(LaneCounters));
      }
    }
  }
  return text;
}

}  // namespace pydist::testing
