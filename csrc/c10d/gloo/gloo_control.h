// Connections of our own between the ranks of a group on gloo, over which they agree on what each
// of them has called: what takes gloo some hundred microseconds takes these some ten.
//
// They carry records of a few bytes, never a tensor's data. An all-gather takes log2(p) rounds,
// each with one frame to another rank (Bruck et al., "Efficient Algorithms for All-to-All
// Communications in Multiport Message-Passing Systems", 1997), so a rank is connected to 2 log2(p)
// others at most.

#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/env.h"
#include "base/fork.h"
#include "base/log_queue.h"
#include "memory/job_secret.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/link.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {

// What a process is on the network, for all its groups on gloo together.
class GlooNode {
 public:
  // By which others reach this process, unless PYDIST_INTERFACE says otherwise: interfaces, or else
  // an address, or else all that the host has.
  struct Place {
    std::vector<std::string> interfaces;
    std::optional<std::string> address;
  };

  // Throws TransportError where the system gives no socket, port or thread, InvalidUsage where
  // there are no such interfaces.
  GlooNode(NetworkSettings settings, const Place& place);
  // The one that this process has, made where it has none. `settings` and `place` are those of the
  // first who asks.
  [[nodiscard]] static std::shared_ptr<GlooNode> of_process(const NetworkSettings& settings,
                                                            const Place& place);

  [[nodiscard]] TcpNode& tcp() noexcept { return tcp_; }

 private:
  LogQueue log_;
  TcpNode tcp_;
};

class GlooControl final : private FrameSink {
 public:
  // What each rank has to know of each other one, to connect. Plain bytes, to be sent.
  struct Card {
    std::uint64_t machine = 0;  // as in ProcessIdentity
    std::array<char, 1024> address{};
    std::array<std::uint64_t, 16> processors{};  // which it may use, as bits
    double quota = 0;                            // of processors; 0: none
    // Rank 0's: by which the ranks know each other. The secret is empty where the environment has
    // one for all.
    std::array<char, 40> token{};
    std::array<char, 80> secret{};
  };

  GlooControl(Environment environment, std::shared_ptr<GlooNode> node);
  GlooControl(const GlooControl&) = delete;
  GlooControl& operator=(const GlooControl&) = delete;
  ~GlooControl() override;

  [[nodiscard]] Card card(std::uint64_t machine) const;

  // Connects to the ranks that this one will speak to, all of which call. `cards`: by rank. Throws
  // TransportError where one can't be reached before the deadline.
  void connect(int rank, std::span<const Card> cards, Deadline deadline);

  // all[r] = rank r's `mine`, each of `bytes` bytes, at most kMostRecordBytes. Collective; for one
  // thread at a time, which calls `look`, where it isn't null, now and then while it waits. Throws
  // PeerLost where a rank is gone or has closed, Aborted once this one has, Timeout.
  void all_gather(const void* mine, void* all, std::size_t bytes, Deadline deadline,
                  const std::function<void()>& look = nullptr);
  static constexpr std::size_t kMostRecordBytes = std::size_t{1} << 20;

  // From now on every all_gather fails, here and on the others. Any thread, any time.
  void close() noexcept;

 private:
  [[nodiscard]] std::byte* place(const FrameHeader& header, std::uint64_t sender) override;
  void take(const FrameHeader& header, const std::byte* payload, std::uint64_t sender) override;
  void lose(std::uint64_t sender) override;

  [[nodiscard]] JobSecret secret_of(const Card& first) const;
  // How long a wait spins before it sleeps.
  [[nodiscard]] std::chrono::nanoseconds spin_time(std::span<const Card> cards) const;
  [[nodiscard]] int size() const noexcept { return static_cast<int>(links_.size()); }
  // What the frame with that number from `sender` has brought.
  [[nodiscard]] std::vector<std::byte> await(int sender, std::uint64_t number, Deadline deadline,
                                             const std::function<void()>& look);
  // With mutex_. Throws where it will not come.
  void check_hope(int sender) const;

  const Birth birth_;
  const Environment environment_;
  const std::shared_ptr<GlooNode> node_;
  std::string token_;
  std::uint64_t id_ = 0;  // 0: not connected
  int rank_ = 0;
  std::chrono::nanoseconds spin_{0};
  std::vector<LinkPtr> links_;  // by rank; null: none is needed
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // By sender and number; guarded by mutex_.
  std::map<std::pair<int, std::uint64_t>, std::vector<std::byte>> arrived_;
  std::vector<bool> is_gone_;  // by rank; guarded by mutex_
  int closed_by_ = -1;         // another rank; guarded by mutex_
  bool is_closed_ = false;     // guarded by mutex_
  std::uint64_t gathers_ = 0;  // guarded by mutex_
};

}  // namespace pydist
