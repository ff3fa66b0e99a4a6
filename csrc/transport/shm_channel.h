// A channel through memory that both ends map: slots in a ring, one counter for each end.
//
// The memory and the counters belong to the caller, are zeroed before the first use, and outlive
// both ends. Two ends that are made anew over the same memory go on where the old ones stopped.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "health/condition.h"
#include "health/doorbell.h"
#include "transport/channel.h"

namespace pydist {

struct ShmChannelMemory {
  std::byte* slots = nullptr;
  std::size_t slot_bytes = 0;
  std::size_t slot_count = 0;
  Counter* sent = nullptr;           // written by the sender
  Counter* released = nullptr;       // written by the receiver
  std::uint32_t* lengths = nullptr;  // bytes in each slot; by the sender, before `sent`
  std::size_t window = 1;            // what is sent is there at once
  // A receiver that has to tell of it by a packet tells of so many released slots at once.
  std::size_t release_every = 1;
};

class ShmSendChannel final : public SendChannel {
 public:
  // `peer_doorbell` wakes the receiver.
  ShmSendChannel(const ShmChannelMemory& memory, int peer, Doorbell& peer_doorbell) noexcept
      : memory_(memory), peer_(peer), peer_doorbell_(peer_doorbell) {}

  [[nodiscard]] std::size_t slot_bytes() const noexcept override { return memory_.slot_bytes; }
  [[nodiscard]] std::size_t window() const noexcept override { return memory_.window; }
  [[nodiscard]] Condition until_free() override;
  [[nodiscard]] std::byte* slot() override;
  void send(std::size_t bytes) override;
  void send_from(const std::byte* data, std::size_t bytes) override;
  [[nodiscard]] Condition until_written() override { return {}; }
  [[nodiscard]] Condition until_reusable() override;

 private:
  [[nodiscard]] std::uint64_t sent() const noexcept {
    return memory_.sent->load(std::memory_order_relaxed);
  }

  ShmChannelMemory memory_;
  int peer_;
  Doorbell& peer_doorbell_;
};

class ShmReceiveChannel final : public ReceiveChannel {
 public:
  // `peer_doorbell` wakes the sender.
  ShmReceiveChannel(const ShmChannelMemory& memory, int peer, Doorbell& peer_doorbell) noexcept
      : memory_(memory), peer_(peer), peer_doorbell_(peer_doorbell) {}

  [[nodiscard]] Condition until_received() override;
  [[nodiscard]] std::span<const std::byte> slot() override;
  void release() override;
  [[nodiscard]] std::uint64_t released() const noexcept override {
    return memory_.released->load(std::memory_order_relaxed);
  }

 private:
  ShmChannelMemory memory_;
  int peer_;
  Doorbell& peer_doorbell_;
};

}  // namespace pydist
