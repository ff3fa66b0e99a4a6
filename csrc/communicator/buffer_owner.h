// Who keeps the memory of an operation's buffers on a device.
//
// Once an operation is over, its caller gives the memory back. Where a backend could not end what
// it runs on the device, it has to prevent that, and so holds on to the owner until the device is
// done.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace pydist {

class BufferOwner {
 public:
  struct Block {
    const void* data;
    std::size_t bytes;
  };

  BufferOwner() = default;
  BufferOwner(const BufferOwner&) = delete;
  BufferOwner& operator=(const BufferOwner&) = delete;
  virtual ~BufferOwner() = default;

  // What it keeps. Several owners may keep one block.
  [[nodiscard]] virtual std::vector<Block> blocks() const = 0;
};

using BufferOwnerPtr = std::shared_ptr<const BufferOwner>;

}  // namespace pydist
