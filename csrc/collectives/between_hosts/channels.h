// The channels between one rank and the others of its group, whatever carries them. All have one
// window. Used by one thread at a time.

#pragma once

#include <cstddef>

#include "transport/channel.h"

namespace pydist {

class Channels {
 public:
  Channels() = default;
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;
  virtual ~Channels() = default;

  // What a slot of any of them takes; and one between ranks of one host, which is no less. The same
  // on all ranks.
  [[nodiscard]] virtual std::size_t slot_bytes() const noexcept = 0;
  [[nodiscard]] virtual std::size_t slot_bytes_on_host() const noexcept = 0;
  [[nodiscard]] virtual std::size_t window() const noexcept = 0;

  // Made when they are first asked for. Throw TransportError where there is no memory for them.
  [[nodiscard]] virtual SendChannel& to(int rank) = 0;
  [[nodiscard]] virtual ReceiveChannel& from(int rank) = 0;
};

}  // namespace pydist
