// Two ranks of this host and one of another host, which the test plays over a raw connection: so it
// can send whatever it likes, as a rank that is broken or hostile would.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/group_segment.h"
#include "communicator/native/group_health.h"
#include "communicator/peers/endpoint.h"
#include "communicator/peers/remote_ranks.h"
#include "memory/file_descriptor.h"
#include "transport/tcp/frame.h"

namespace pydist::testing {

inline constexpr int kRemoteSize = 3;
inline constexpr int kRemote = 2;  // the rank of the other host; 0 and 1 are here
inline constexpr std::uint64_t kRemoteGroup = 0x5eed5eed5eed5eedull;
inline constexpr std::size_t kRemoteChunkBytes = 4096;

class RemoteGround {
 public:
  // `rank`: which of the two here is played by the engine. `connects`: whether the rank of the
  // other host has a connection to it.
  explicit RemoteGround(int rank = 0, bool connects = true);
  ~RemoteGround();
  RemoteGround(const RemoteGround&) = delete;
  RemoteGround& operator=(const RemoteGround&) = delete;

  // The rank of the other host is another process from now on, which has not sent anything; the
  // memory of the group is as new.
  void renew();

  // Another process that this one knows, connected in a group that is not under test.
  struct Process {
    PeerPtr peer;
    std::string name;
    FileDescriptor connection;
  };
  [[nodiscard]] Process connect(const std::string& host, bool connects = true);

  [[nodiscard]] FrameHeader header(FrameKind kind, std::uint64_t number = 0) const;
  // From the rank of the other host; false where the connection is gone.
  bool send(const FrameHeader& header, std::string_view payload = {});
  // What this host has sent to that rank, of one kind, ordered as it came; waits for the first one.
  [[nodiscard]] std::optional<std::string> receive(FrameKind kind);
  // More than any connection takes at once lies ahead of what is sent from now on.
  void fill_link();

  // One more connection of that rank; none where it is lost already.
  [[nodiscard]] FileDescriptor connect_again() const;
  // The rank of the other host ends.
  void disconnect() { far_.connection = FileDescriptor(); }
  [[nodiscard]] int connection() const { return far_.connection.get(); }
  [[nodiscard]] Link& link() { return *far_.peer->link; }
  [[nodiscard]] const Peer& far() const { return *far_.peer; }
  [[nodiscard]] RemoteRanks& remote() { return *remote_; }
  [[nodiscard]] GroupHealth& health() { return *health_; }
  [[nodiscard]] Endpoint& endpoint() { return *endpoint_; }
  [[nodiscard]] const std::shared_ptr<Endpoint>& shared_endpoint() const { return endpoint_; }
  [[nodiscard]] const GroupSegment& segment() const { return segment_; }
  [[nodiscard]] const LaneSegment& messages() const { return messages_; }
  [[nodiscard]] const LaneSegment& collectives() const { return collectives_; }
  // Shared by all ranks of the host, but for what belongs to the remote rank.
  [[nodiscard]] std::string memory_of_this_host() const;

 private:
  void make_ranks();

  const int rank_;
  std::string token_;
  JobSecret secret_;
  std::shared_ptr<Endpoint> endpoint_;
  Process far_;
  GroupSegment segment_;
  LaneSegment messages_;
  LaneSegment collectives_;
  std::shared_ptr<RemoteRanks> remote_;
  std::unique_ptr<GroupHealth> health_;
};

}  // namespace pydist::testing
