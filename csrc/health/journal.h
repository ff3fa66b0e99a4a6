// What a process has been doing: its last operations, in shared memory, readable by every peer on
// the host whatever state the process is in. Always on.
//
// Any thread of the owning process writes; any process reads. An entry is guarded by its version
// word: readers drop an entry that changed under them. The journal lives in zeroed shared memory
// and is never constructed or destroyed.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pydist {

enum class JournalState : std::uint8_t { kRunning, kSucceeded, kFailed };

struct JournalEntry {
  std::uint64_t group = 0;     // fingerprint_on_host() or fingerprint_on_gpu()
  std::uint64_t sequence = 0;  // the operation's number in the group
  std::uint8_t kind = 0;       // OpKind, opaque here
  JournalState state = JournalState::kRunning;
  std::uint64_t bytes = 0;
  std::int64_t started_ns = 0;   // monotonic clock of the host, the coarse one
  std::int64_t finished_ns = 0;  // 0 while running
  std::string label;
};

// What the entries of a group's operations are marked with: of those on the host, and of those on a
// GPU, which NCCL groups number by themselves.
[[nodiscard]] std::uint64_t fingerprint_on_host(const std::string& group_name);
[[nodiscard]] std::uint64_t fingerprint_on_gpu(const std::string& group_name);

[[nodiscard]] std::int64_t monotonic_ns() noexcept;
// The same clock as of the system's last tick, a few milliseconds ago at most: read in a fraction
// of the time.
[[nodiscard]] std::int64_t coarse_monotonic_ns() noexcept;

class Journal {
 public:
  using Ticket = std::uint64_t;

  // So many operations it remembers.
  static constexpr std::size_t kEntries = 64;

  // Opens an entry; the label is cut to fit.
  Ticket begin(std::uint64_t group, std::uint64_t sequence, std::uint8_t kind, std::uint64_t bytes,
               std::string_view label) noexcept;

  // Closes it, unless so many have begun since that it is gone.
  void finish(Ticket ticket, JournalState state) noexcept;

  // The entries that can be read, the newest first.
  [[nodiscard]] std::vector<JournalEntry> read() const;

  // Adds to all times: of a copy of another host's journal, which has a clock of its own.
  void shift_times(std::int64_t ns) noexcept;

 private:
  static constexpr std::size_t kLabelWords = 8;

  // Words are atomics so that a torn read is a stale value, not undefined behaviour.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> version;  // 2 * (ticket + 1), odd while it is written
    std::atomic<std::uint64_t> group;
    std::atomic<std::uint64_t> sequence;
    std::atomic<std::uint64_t> kind_and_state;
    std::atomic<std::uint64_t> bytes;
    std::atomic<std::int64_t> started_ns;
    std::atomic<std::int64_t> finished_ns;
    std::array<std::atomic<std::uint64_t>, kLabelWords> label;
  };

  // Null if it is gone.
  [[nodiscard]] Slot* open_slot(Ticket ticket) noexcept;
  static void close(Slot& slot, std::int64_t finished_ns, JournalState state) noexcept;
  [[nodiscard]] static std::optional<JournalEntry> read_slot(const Slot& slot);

  std::atomic<std::uint64_t> next_ticket_;
  std::array<Slot, kEntries> slots_;
};

}  // namespace pydist
