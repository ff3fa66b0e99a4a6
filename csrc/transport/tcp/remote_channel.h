// A channel to or from a rank on another host: a lane of this host's memory at each end, and frames
// between them (frame.h). What arrives is written into the lane, or to where the receiver expects
// it, by the thread that serves the network.

#pragma once

#include <functional>

#include "transport/channel.h"
#include "transport/shm_channel.h"
#include "transport/tcp/link.h"
#include "transport/tcp/segment_targets.h"

namespace pydist {

class RemoteSendChannel final : public SendChannel {
 public:
  // `header` says whose channel it is. `reserve` backs the slots with memory, before the first of
  // them is filled.
  RemoteSendChannel(const ShmChannelMemory& memory, const FrameHeader& header, LinkPtr link,
                    std::function<void()> reserve)
      : memory_(memory), header_(header), link_(std::move(link)), reserve_(std::move(reserve)) {}

  [[nodiscard]] std::size_t slot_bytes() const noexcept override { return memory_.slot_bytes; }
  [[nodiscard]] std::size_t window() const noexcept override { return memory_.window; }
  [[nodiscard]] Condition until_free() override {
    const std::uint64_t next = sent() + 1;
    return next <= memory_.slot_count
               ? Condition()
               : Condition(*memory_.released, header_.receiver, next - memory_.slot_count);
  }
  [[nodiscard]] std::byte* slot() override {
    if (reserve_) {
      std::exchange(reserve_, nullptr)();
    }
    return memory_.slots + (sent() % memory_.slot_count) * memory_.slot_bytes;
  }
  void send(std::size_t bytes) override { send_from(slot(), bytes); }
  void send_from(const std::byte* data, std::size_t bytes) override {
    PYDIST_CHECK(bytes <= memory_.slot_bytes);
    header_.number = sent() + 1;
    header_.bytes = static_cast<std::uint32_t>(bytes);
    memory_.sent->store(header_.number, std::memory_order_relaxed);
    ++given_;
    link_->send_segment(header_, data, written_);
  }
  [[nodiscard]] Condition until_written() override { return {written_, header_.receiver, given_}; }
  // Its slots are nobody else's.
  [[nodiscard]] Condition until_reusable() override { return until_written(); }

 private:
  [[nodiscard]] std::uint64_t sent() const noexcept {
    return memory_.sent->load(std::memory_order_relaxed);
  }

  ShmChannelMemory memory_;
  FrameHeader header_;
  LinkPtr link_;
  std::function<void()> reserve_;
  std::uint64_t given_ = 0;  // segments, to the link
  Counter written_{0};       // by the link
};

class RemoteReceiveChannel final : public ReceiveChannel {
 public:
  // `header` is that of the answers: from this rank to the sender. `targets`, where there are any,
  // outlive the channel.
  RemoteReceiveChannel(const ShmChannelMemory& memory, const FrameHeader& header, LinkPtr link,
                       Doorbell& own_doorbell, SegmentTargets* targets)
      : channel_(memory, header.receiver, own_doorbell),
        release_every_(memory.release_every),
        header_(header),
        link_(std::move(link)),
        targets_(targets) {}

  [[nodiscard]] std::uint64_t released() const noexcept override { return channel_.released(); }
  void expect(std::uint64_t number, std::span<std::byte> target) override {
    if (targets_ != nullptr) {
      targets_->expect(number, target);
    }
  }
  [[nodiscard]] Condition until_received() override { return channel_.until_received(); }
  [[nodiscard]] std::span<const std::byte> slot() override {
    const std::span<const std::byte> in_slot = channel_.slot();
    const std::byte* const place =
        targets_ != nullptr ? targets_->place_of(released() + 1) : nullptr;
    return place != nullptr ? std::span(place, in_slot.size()) : in_slot;
  }
  void release() override {
    channel_.release();
    header_.number = released();
    if (targets_ != nullptr) {
      targets_->forget_until(header_.number);
    }
    if (header_.number % release_every_ == 0) {
      link_->send(header_);
    }
  }

 private:
  ShmReceiveChannel channel_;
  std::size_t release_every_;
  FrameHeader header_;
  LinkPtr link_;
  SegmentTargets* targets_;
};

}  // namespace pydist
