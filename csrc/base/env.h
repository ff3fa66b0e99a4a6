// The one place where the engine's environment variables are declared, read and validated.
//
// A value that cannot be understood throws InvalidUsage naming the variable, the value and the
// valid ones.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pydist {

// TCP ports that may be listened on, both ends included; 0 to 0: whichever is free.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
};

// How processes of different hosts connect.
struct NetworkSettings {
  PortRange ports;
  // Those whose addresses others are to connect to; none: see `address`.
  std::vector<std::string> interfaces;
  // By which this host reaches its job; nothing: all that it has.
  std::optional<std::string> address;
  // Connections that each end makes to another process. Without a value: one to a process on the
  // same machine, where more take turns on the same cores; two to others.
  std::optional<std::size_t> sockets;
};

enum class AlgorithmChoice { kAuto, kDirect, kRing };
enum class TuningChoice { kOn, kUncached, kOff };
enum class LogLevel { kError, kWarning, kInfo, kDebug };

[[nodiscard]] std::string_view to_string(AlgorithmChoice choice) noexcept;
[[nodiscard]] std::string_view to_string(TuningChoice choice) noexcept;
[[nodiscard]] std::string_view to_string(LogLevel level) noexcept;

struct EnvironmentVariable {
  std::string_view name;
  std::string_view values;         // what may be written, for people
  std::string_view default_value;  // as it would be written
  std::string_view meaning;
};

// Every variable, in the order in which `pydist info` lists them.
[[nodiscard]] std::span<const EnvironmentVariable> environment_variables() noexcept;

// What is logged: the least level, and other ones for some subsystems.
struct LogLevels {
  LogLevel all = LogLevel::kWarning;
  std::vector<std::pair<std::string, LogLevel>> of_subsystems;
};

// The parts of pydist that PYDIST_LOG knows by name: of the engine, the folder of csrc that a line
// comes from; of the Python package, the folder of pydist.
[[nodiscard]] std::span<const std::string_view> log_subsystems() noexcept;

struct Environment {
  AlgorithmChoice algorithm = AlgorithmChoice::kAuto;
  // How long an operation may take before it fails with Timeout.
  std::chrono::milliseconds timeout{600'000};
  // By which the processes of a job know each other (memory/job_secret.h).
  std::optional<std::string> job_secret;
  // Overrides the identity of this host; ranks with different values never share memory.
  std::optional<std::string> host_id;
  NetworkSettings network;
  // How long a waiter spins before it sleeps; 0 sleeps at once. Without a value the engine spins
  // only where every local rank has a core of its own.
  std::optional<std::chrono::microseconds> spin;
  // The most bytes that a rank stages at a time for ordinary (not symmetric) tensors.
  std::size_t chunk_bytes = 512 * 1024;
  // Whether it stages as many each time, since the user has said how many.
  bool pins_chunk = false;
  // The most bytes that a rank gives to all others whole, in one chunk at most; without a value as
  // many as pay on most machines (collectives/shared_memory/route.h).
  std::optional<std::size_t> one_shot_bytes;
  // From how many hosts on ranks talk in rounds, and the most bytes of an all_reduce that goes so;
  // without a value as RoundsSettings (collectives/between_hosts/between_hosts.h).
  std::optional<std::size_t> rounds_from;
  std::optional<std::size_t> rounds_bytes;
  TuningChoice tuning = TuningChoice::kOn;
  // Whether ranks may read each other's memory through the kernel (memory/process_memory.h).
  bool single_copy = true;
  // Bytes of a slot that device tensors pass through where the backend moves host memory.
  std::size_t staging_bytes = std::size_t{4} << 20;
  // How long a peer's heartbeat may be stale before a warning.
  std::chrono::milliseconds heartbeat_warning{5'000};
  // How long it may be stale before the peer counts as lost, where nothing else tells of its death.
  std::chrono::milliseconds heartbeat_timeout{30'000};
  // Caps the instruction set of the CPU kernels; empty means the best that the processor has.
  std::string cpu_isa;
  // Compares averaged gradients between ranks.
  bool debug = false;
  // Where traces of training steps go; empty for nowhere.
  std::string timeline;
  LogLevels log_levels;

  // Reads and validates the process's environment.
  [[nodiscard]] static Environment read();
  // How long a waiter spins, where every local rank has a core of its own or not.
  [[nodiscard]] std::chrono::nanoseconds spin_time(bool has_core_for_every_rank) const noexcept;
  // `host_id` alone: any text is valid.
  [[nodiscard]] static std::optional<std::string> read_host_id();
};

}  // namespace pydist
