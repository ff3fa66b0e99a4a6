#include "health/journal.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>

#include "base/digest.h"

namespace pydist {

std::uint64_t fingerprint_on_host(const std::string& group_name) {
  Digest digest;
  digest.add(group_name);
  return digest.value();
}

std::uint64_t fingerprint_on_gpu(const std::string& group_name) {
  return fingerprint_on_host(group_name + " on the GPU");
}

std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::int64_t coarse_monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

Journal::Ticket Journal::begin(std::uint64_t group, std::uint64_t sequence, std::uint8_t kind,
                               std::uint64_t bytes, std::string_view label) noexcept {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const Ticket ticket = next_ticket_.fetch_add(1, kRelaxed);
  Slot& slot = slots_[ticket % kEntries];
  slot.version.store(2 * ticket + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_release);
  slot.group.store(group, kRelaxed);
  slot.sequence.store(sequence, kRelaxed);
  slot.kind_and_state.store(kind, kRelaxed);
  slot.bytes.store(bytes, kRelaxed);
  slot.started_ns.store(coarse_monotonic_ns(), kRelaxed);
  slot.finished_ns.store(0, kRelaxed);
  // An empty label costs one word, so that the hot path does not pay for the others' names.
  std::size_t word_index = 0;
  do {
    std::uint64_t word = 0;
    if (label.size() > word_index * 8) {
      std::memcpy(&word, label.data() + word_index * 8,
                  std::min<std::size_t>(8, label.size() - word_index * 8));
    }
    slot.label[word_index].store(word, kRelaxed);
    ++word_index;
  } while (word_index < kLabelWords && label.size() >= word_index * 8);
  slot.version.store(2 * (ticket + 1), std::memory_order_release);
  return ticket;
}

Journal::Slot* Journal::open_slot(Ticket ticket) noexcept {
  Slot& slot = slots_[ticket % kEntries];
  return slot.version.load(std::memory_order_acquire) == 2 * (ticket + 1) ? &slot : nullptr;
}

void Journal::close(Slot& slot, std::int64_t finished_ns, JournalState state) noexcept {
  slot.finished_ns.store(finished_ns, std::memory_order_relaxed);
  const std::uint64_t kind = slot.kind_and_state.load(std::memory_order_relaxed) & 0xff;
  slot.kind_and_state.store(kind | (static_cast<std::uint64_t>(state) << 8),
                            std::memory_order_release);
}

void Journal::finish(Ticket ticket, JournalState state) noexcept {
  if (Slot* slot = open_slot(ticket)) {
    close(*slot, coarse_monotonic_ns(), state);
  }
}

void Journal::shift_times(std::int64_t ns) noexcept {
  for (Slot& slot : slots_) {
    for (std::atomic<std::int64_t>* const time : {&slot.started_ns, &slot.finished_ns}) {
      if (time->load(std::memory_order_relaxed) != 0) {
        time->fetch_add(ns, std::memory_order_relaxed);
      }
    }
  }
}

std::optional<JournalEntry> Journal::read_slot(const Slot& slot) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const std::uint64_t before = slot.version.load(std::memory_order_acquire);
  if (before == 0 || before % 2 == 1) {
    return std::nullopt;
  }
  JournalEntry entry;
  const std::uint64_t kind_and_state = slot.kind_and_state.load(std::memory_order_acquire);
  entry.group = slot.group.load(kRelaxed);
  entry.sequence = slot.sequence.load(kRelaxed);
  entry.kind = static_cast<std::uint8_t>(kind_and_state & 0xff);
  entry.state = static_cast<JournalState>((kind_and_state >> 8) & 0xff);
  entry.bytes = slot.bytes.load(kRelaxed);
  entry.started_ns = slot.started_ns.load(kRelaxed);
  // The owner may be closing the entry just now.
  entry.finished_ns = entry.state == JournalState::kRunning ? 0 : slot.finished_ns.load(kRelaxed);
  std::array<char, kLabelWords * 8> text{};
  for (std::size_t i = 0; i < kLabelWords; ++i) {
    const std::uint64_t word = slot.label[i].load(kRelaxed);
    std::memcpy(text.data() + i * 8, &word, 8);
    if (text[i * 8 + 7] == '\0') {
      break;  // the words behind the end of the text are left over from an older label
    }
  }
  entry.label.assign(text.data(), ::strnlen(text.data(), text.size()));
  std::atomic_thread_fence(std::memory_order_acquire);
  if (slot.version.load(kRelaxed) != before) {
    return std::nullopt;
  }
  return entry;
}

std::vector<JournalEntry> Journal::read() const {
  std::vector<JournalEntry> entries;
  const std::uint64_t end = next_ticket_.load(std::memory_order_acquire);
  const std::uint64_t begin = end > kEntries ? end - kEntries : 0;
  for (std::uint64_t ticket = end; ticket > begin; --ticket) {
    if (auto entry = read_slot(slots_[(ticket - 1) % kEntries])) {
      entries.push_back(std::move(*entry));
    }
  }
  return entries;
}

}  // namespace pydist
