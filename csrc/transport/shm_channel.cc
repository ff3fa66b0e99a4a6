#include "transport/shm_channel.h"

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
  memory_.sent->store(sent() + 1, std::memory_order_release);
  peer_doorbell_.ring();
}

Condition ShmSendChannel::until_drained() { return {*memory_.released, peer_, sent()}; }

Condition ShmReceiveChannel::until_received() { return {*memory_.sent, peer_, released() + 1}; }

const std::byte* ShmReceiveChannel::slot() {
  return memory_.slots + (released() % memory_.slot_count) * memory_.slot_bytes;
}

void ShmReceiveChannel::release() {
  memory_.released->store(released() + 1, std::memory_order_release);
  peer_doorbell_.ring();
}

}  // namespace pydist
