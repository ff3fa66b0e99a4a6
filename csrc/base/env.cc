#include "base/env.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/enum_names.h"
#include "base/error.h"
#include "base/parse_name.h"

namespace pydist {
namespace {

constexpr std::chrono::microseconds kDefaultSpin{50};

constexpr std::array kVariables = {
    EnvironmentVariable{"PYDIST_CONFIG", "a file", "",
                        "TOML, or JSON if its name ends in .json: what neither the program nor a "
                        "variable says (pydist.Config)."},
    EnvironmentVariable{"PYDIST_BACKEND", "auto | native | nccl | gloo", "auto",
                        "Which backend carries the collectives. auto takes the fastest that every "
                        "rank of the job can use."},
    EnvironmentVariable{"PYDIST_ALGORITHM", "auto | direct | ring", "auto",
                        "Pins the algorithm of all_reduce, reduce_scatter and all_gather on native "
                        "and nccl."},
    EnvironmentVariable{"PYDIST_TIMEOUT", "seconds, 0.001 or more", "600",
                        "How long an operation may take before every rank fails with Timeout."},
    EnvironmentVariable{"PYDIST_JOB_SECRET", "32 characters or more", "",
                        "By which the ranks of a job know each other. The same on every rank, and "
                        "known to nobody else; `pydist run` and pydist.spawn make one up. Unset: "
                        "the ranks of a host share one through a file of their user's."},
    EnvironmentVariable{"PYDIST_HOST_ID", "any text", "",
                        "Overrides the identity of this host: ranks with different values never "
                        "share memory."},
    EnvironmentVariable{"PYDIST_INTERFACE", "interfaces, as in eth0,eth1", "",
                        "The network interfaces that other hosts connect to; several are used "
                        "together. Unset: the one by which this host reaches the job's store."},
    EnvironmentVariable{"PYDIST_PORTS", "first-last", "",
                        "The TCP ports that a rank may listen on for other hosts: one for each "
                        "rank of a host. Unset: whichever is free."},
    EnvironmentVariable{"PYDIST_SOCKETS", "1 to 16", "",
                        "TCP connections that a rank makes to each one on another host. Unset: 2, "
                        "1 to a container of the same machine, and at least one for each of "
                        "PYDIST_INTERFACE."},
    EnvironmentVariable{"PYDIST_SPIN_US", "microseconds, 0 or more", "",
                        "How long a waiter spins before it sleeps. Unset: 50 where every local "
                        "rank has a core of its own, otherwise 0."},
    EnvironmentVariable{
        "PYDIST_TUNING", "on | uncached | off", "on",
        "Whether collectives and messages between the ranks of a host are timed, to "
        "move data in the way that is fastest here, and begin with what earlier jobs "
        "found; uncached begins with nothing and keeps nothing. The "
        "same on every rank."},
    EnvironmentVariable{"PYDIST_SINGLE_COPY", "on | off", "on",
                        "Whether ranks of a host may read each other's ordinary tensors through "
                        "the kernel, in messages and in collectives that only copy: where it lets "
                        "all of them, and PYDIST_TUNING finds it quicker. Off on one rank is off "
                        "on all."},
    EnvironmentVariable{"PYDIST_CHUNK_BYTES", "4096 to 16777216", "524288",
                        "Bytes that a rank stages at a time for tensors outside the symmetric "
                        "heap, and sends at a time to another host, there no more than 524288. The "
                        "same on every rank. Unset: that many at most, and as many as are fastest "
                        "inside a host (PYDIST_TUNING)."},
    EnvironmentVariable{"PYDIST_ONE_SHOT_BYTES", "0 to 16777216", "",
                        "The most bytes that a rank gives to all others whole, in one step, and "
                        "not in parts in two; no more than PYDIST_CHUNK_BYTES. The same on every "
                        "rank. Unset: 64 KiB, but 128 KiB divided among the other ranks where they "
                        "reduce, and near that what is fastest (PYDIST_TUNING)."},
    EnvironmentVariable{
        "PYDIST_ROUNDS_FROM", "2 to 1048576", "",
        "From how many hosts on ranks tell each other of a collective in rounds: "
        "each log2(hosts) others, one after the other, and not every host at once. "
        "The same on every rank. Results do not depend on it. Unset: 32, or 3 where "
        "all hosts are containers of one machine."},
    EnvironmentVariable{
        "PYDIST_ROUNDS_BYTES", "0 to 16777216", "",
        "The most bytes of an all_reduce between hosts of one rank each whose data "
        "goes in rounds (PYDIST_ROUNDS_FROM), where it is not sent whole to all. The "
        "same on every rank. Results do not depend on it. No more than some "
        "1.5 times PYDIST_CHUNK_BYTES go so. Unset: 4 KiB for each host, and 256 KiB "
        "from 64 hosts on or on one machine."},
    EnvironmentVariable{"PYDIST_STAGING_BYTES", "65536 to 1073741824", "4194304",
                        "Bytes of a part of a GPU tensor on its way through host memory, where the "
                        "backend is native or gloo. The same on every rank."},
    EnvironmentVariable{"PYDIST_HEARTBEAT_WARNING", "seconds, 0.001 or more", "5",
                        "How long a peer's heartbeat may be stale before a warning."},
    EnvironmentVariable{"PYDIST_HEARTBEAT_TIMEOUT", "seconds, 0.001 or more", "30",
                        "How long a peer's heartbeat may be stale before the peer counts as lost, "
                        "where the system cannot tell whether it lives (another PID namespace)."},
    EnvironmentVariable{"PYDIST_DEBUG", "0 | 1", "0",
                        "1 compares the averaged gradients of all ranks, bit by bit, after every "
                        "step."},
    EnvironmentVariable{"PYDIST_TIMELINE", "a path", "",
                        "Writes a trace of every step of DataParallel for Perfetto or "
                        "chrome://tracing; trace.json becomes trace.rank0.json on rank 0."},
    EnvironmentVariable{"PYDIST_DUMP", "a folder", "",
                        "A rank that gets SIGUSR1, or ends by an exception, writes there what all "
                        "ranks of its host are in, and its Python stacks (pydist doctor)."},
    EnvironmentVariable{"PYDIST_FAULTS", "faults", "",
                        "Lets something go wrong on purpose, such as kill rank=1 step=3 "
                        "phase=backward (pydist.testing.faults)."},
    EnvironmentVariable{"PYDIST_CPU_ISA", "portable | avx2 | avx512 | neon", "",
                        "Caps the instruction set of the CPU kernels."},
    EnvironmentVariable{"PYDIST_LOG", "error | warning | info | debug", "warning",
                        "What is logged to standard error. Subsystems may have levels of their "
                        "own, as in warning,health=debug."},
};

constexpr std::array<std::string_view, 15> kLogSubsystems = {
    "c10d", "communicator", "checkpoint", "gloo",     "health",   "job",     "memory",  "native",
    "nccl", "parallel",     "reducer",    "sampling", "sharding", "testing", "topology"};

constexpr std::array<std::string_view, 4> kBackends = {"auto", "native", "nccl", "gloo"};
constexpr std::array<std::string_view, 3> kAlgorithms = {"auto", "direct", "ring"};
constexpr std::array<std::string_view, 3> kTuningChoices = {"on", "uncached", "off"};
constexpr std::array<std::string_view, 2> kOffOrOn = {"off", "on"};
constexpr std::array<std::string_view, 4> kLogLevels = {"error", "warning", "info", "debug"};
constexpr std::array<std::string_view, 4> kInstructionSets = {"portable", "avx2", "avx512", "neon"};

std::optional<std::string> lookup(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return std::string(value);
}

LogLevel parse_level(std::string_view value, std::string_view whole) {
  const auto found = std::find(kLogLevels.begin(), kLogLevels.end(), value);
  if (found == kLogLevels.end()) {
    reject_text("PYDIST_LOG", whole,
                list_of(kLogLevels) + ", also for a subsystem, as in warning,health=debug");
  }
  return static_cast<LogLevel>(found - kLogLevels.begin());
}

// "warning,health=debug": levels, each for everything or for a subsystem.
LogLevels parse_levels(std::string_view text) {
  LogLevels levels;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      levels.all = parse_level(part, text);
      continue;
    }
    const std::string_view subsystem = part.substr(0, equals);
    if (std::find(kLogSubsystems.begin(), kLogSubsystems.end(), subsystem) ==
        kLogSubsystems.end()) {
      throw InvalidUsage(join("PYDIST_LOG='", text, "' is not valid: there is no subsystem '",
                              subsystem, "'; use one of: ", list_of(kLogSubsystems), "."));
    }
    levels.of_subsystems.emplace_back(subsystem, parse_level(part.substr(equals + 1), text));
  }
  return levels;
}

double parse_number(const char* name, const std::string& value, double lowest, double highest,
                    std::string_view valid) {
  double number = 0.0;
  const char* end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, number);
  // The comparison is written so that NaN fails it.
  if (code != std::errc{} || stop != end || !(number >= lowest && number <= highest)) {
    reject_text(name, value, valid);
  }
  return number;
}

// Ten years: longer than any job, short enough for nanoseconds in 64 bits.
constexpr double kLongestSeconds = 3.2e8;

// Into `seconds`, where the variable has a value; likewise below.
void read_seconds(const char* name, std::chrono::milliseconds& seconds) {
  if (const auto value = lookup(name)) {
    seconds = std::chrono::milliseconds(std::llround(
        parse_number(name, *value, 1e-3, kLongestSeconds, "seconds, 0.001 or more") * 1e3));
  }
}

void read_whole(const char* name, std::size_t least, std::size_t most, std::size_t& bytes) {
  if (const auto value = lookup(name)) {
    const std::string valid = join("a whole number from ", least, " to ", most);
    const double number =
        parse_number(name, *value, static_cast<double>(least), static_cast<double>(most), valid);
    if (number != std::floor(number)) {
      reject_text(name, *value, valid);
    }
    bytes = static_cast<std::size_t>(number);
  }
}

constexpr std::size_t kLeastSecretLength = 32;

NetworkSettings read_network() {
  NetworkSettings network;
  const std::string interfaces = lookup("PYDIST_INTERFACE").value_or("");
  for (std::string_view rest = interfaces; !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), name.size() + 1));
    if (!name.empty()) {
      network.interfaces.emplace_back(name);
    }
  }
  if (const auto value = lookup("PYDIST_PORTS")) {
    const std::string& text = *value;
    const std::string valid = "two ports from 1 to 65535, as in 29600-29663";
    const std::size_t dash = std::min(text.find('-'), text.size());
    const auto port = [&](const std::string& part) {
      std::uint16_t number = 0;
      const char* const end = part.data() + part.size();
      const auto [rest, code] = std::from_chars(part.data(), end, number);
      if (code != std::errc() || rest != end || number == 0) {
        reject_text("PYDIST_PORTS", text, valid);
      }
      return number;
    };
    network.ports.first = port(text.substr(0, dash));
    network.ports.last = dash == text.size() ? network.ports.first : port(text.substr(dash + 1));
    if (network.ports.last < network.ports.first) {
      reject_text("PYDIST_PORTS", text, valid);
    }
  }
  if (lookup("PYDIST_SOCKETS")) {
    read_whole("PYDIST_SOCKETS", 1, 16, network.sockets.emplace());
  }
  return network;
}

}  // namespace

std::string_view to_string(AlgorithmChoice choice) noexcept {
  return name_in(kAlgorithms, choice, "auto");
}

std::string_view to_string(TuningChoice choice) noexcept {
  return name_in(kTuningChoices, choice, "on");
}

std::string_view to_string(LogLevel level) noexcept {
  return name_in(kLogLevels, level, "warning");
}

std::span<const EnvironmentVariable> environment_variables() noexcept { return kVariables; }

std::span<const std::string_view> log_subsystems() noexcept { return kLogSubsystems; }

std::chrono::nanoseconds Environment::spin_time(bool has_core_for_every_rank) const noexcept {
  return spin.value_or(has_core_for_every_rank ? kDefaultSpin : std::chrono::microseconds(0));
}

std::optional<std::string> Environment::read_host_id() { return lookup("PYDIST_HOST_ID"); }

Environment Environment::read() {
  Environment environment;
  if (const auto value = lookup("PYDIST_BACKEND")) {
    static_cast<void>(place_of_name(kBackends, *value, "PYDIST_BACKEND"));
  }
  if (const auto value = lookup("PYDIST_ALGORITHM")) {
    environment.algorithm = parse_name<AlgorithmChoice>(kAlgorithms, *value, "PYDIST_ALGORITHM");
  }
  read_seconds("PYDIST_TIMEOUT", environment.timeout);
  environment.job_secret = lookup("PYDIST_JOB_SECRET");
  if (environment.job_secret && environment.job_secret->size() < kLeastSecretLength) {
    throw InvalidUsage(join("PYDIST_JOB_SECRET has ", environment.job_secret->size(),
                            " characters, so it can be guessed; use at least ", kLeastSecretLength,
                            " (128 random bits in hexadecimal)."));
  }
  environment.host_id = read_host_id();
  environment.network = read_network();
  if (const auto value = lookup("PYDIST_SPIN_US")) {
    environment.spin = std::chrono::microseconds(static_cast<std::int64_t>(
        parse_number("PYDIST_SPIN_US", *value, 0, 1e6, "microseconds from 0 to 1000000")));
  }
  if (const auto value = lookup("PYDIST_TUNING")) {
    environment.tuning = parse_name<TuningChoice>(kTuningChoices, *value, "PYDIST_TUNING");
  }
  if (const auto value = lookup("PYDIST_SINGLE_COPY")) {
    environment.single_copy = place_of_name(kOffOrOn, *value, "PYDIST_SINGLE_COPY") == 1;
  }
  read_whole("PYDIST_CHUNK_BYTES", 4096, 16777216, environment.chunk_bytes);
  environment.pins_chunk = lookup("PYDIST_CHUNK_BYTES").has_value();
  if (lookup("PYDIST_ONE_SHOT_BYTES")) {
    read_whole("PYDIST_ONE_SHOT_BYTES", 0, 16777216, environment.one_shot_bytes.emplace());
  }
  if (lookup("PYDIST_ROUNDS_FROM")) {
    read_whole("PYDIST_ROUNDS_FROM", 2, 1048576, environment.rounds_from.emplace());
  }
  if (lookup("PYDIST_ROUNDS_BYTES")) {
    read_whole("PYDIST_ROUNDS_BYTES", 0, 16777216, environment.rounds_bytes.emplace());
  }
  read_whole("PYDIST_STAGING_BYTES", 65536, 1073741824, environment.staging_bytes);
  read_seconds("PYDIST_HEARTBEAT_WARNING", environment.heartbeat_warning);
  read_seconds("PYDIST_HEARTBEAT_TIMEOUT", environment.heartbeat_timeout);
  if (const auto value = lookup("PYDIST_CPU_ISA")) {
    static_cast<void>(place_of_name(kInstructionSets, *value, "PYDIST_CPU_ISA"));
    environment.cpu_isa = *value;
  }
  if (const auto value = lookup("PYDIST_DEBUG")) {
    if (*value != "0" && *value != "1") {
      reject_text("PYDIST_DEBUG", *value, "0, 1");
    }
    environment.debug = *value == "1";
  }
  environment.timeline = lookup("PYDIST_TIMELINE").value_or("");
  if (const auto value = lookup("PYDIST_LOG")) {
    environment.log_levels = parse_levels(*value);
  }
  return environment;
}

}  // namespace pydist
