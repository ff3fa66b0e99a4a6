#include "transport/shm_channel.h"

#include <cstring>

#include "base/error.h"

namespace pydist {

Condition ShmSendChannel::until_free() {
  const std::uint64_t next = sent() + 1;
  if (next <= memory_.slot_count) {
    return {};
  }
  return {*memory_.released, peer_, next - memory_.slot_count};
}

std::byte* ShmSendChannel::slot() {
  return memory_.slots + (sent() % memory_.slot_count) * memory_.slot_bytes;
}

void ShmSendChannel::send(std::size_t bytes) {
  PYDIST_CHECK(bytes <= memory_.slot_bytes);
  memory_.lengths[sent() % memory_.slot_count] = static_cast<std::uint32_t>(bytes);
  memory_.sent->store(sent() + 1, std::memory_order_release);
  peer_doorbell_.ring();
}

void ShmSendChannel::send_from(const std::byte* data, std::size_t bytes) {
  PYDIST_CHECK(bytes <= memory_.slot_bytes);
  if (bytes != 0) {
    std::memcpy(slot(), data, bytes);
  }
  send(bytes);
}

Condition ShmSendChannel::until_reusable() { return {*memory_.released, peer_, sent()}; }

Condition ShmReceiveChannel::until_received() { return {*memory_.sent, peer_, released() + 1}; }

std::span<const std::byte> ShmReceiveChannel::slot() {
  const std::size_t index = released() % memory_.slot_count;
  const std::size_t bytes = memory_.lengths[index];
  // Another process writes it.
  PYDIST_CHECK(bytes <= memory_.slot_bytes);
  return {memory_.slots + index * memory_.slot_bytes, bytes};
}

void ShmReceiveChannel::release() {
  memory_.released->store(released() + 1, std::memory_order_release);
  peer_doorbell_.ring();
}

}  // namespace pydist
