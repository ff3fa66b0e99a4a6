#include "communicator/native/message_reads.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "collectives/heap_access.h"

namespace pydist {
namespace {

class ReadsInGroup final : public MessageReads {
 public:
  explicit ReadsInGroup(std::shared_ptr<const Group> group) : group_(std::move(group)) {}

  [[nodiscard]] MessagePlace place_of(int peer, const Buffer& buffer) const noexcept override {
    const HeapWindow* const own = group_->window(group_->rank());
    // Ranks switch their windows on together: so the other one can read here where this one can
    // read there.
    if (own != nullptr && own->is_on() && group_->window(peer)->is_on()) {
      if (const HeapReference found = own->find(buffer.data, buffer.bytes()); found != 0) {
        return {MessagePlace::In::kSharedHeap, found};
      }
    }
    if (!group_->reads_processes()) {
      return {};
    }
    return {MessagePlace::In::kProcess, reinterpret_cast<std::uintptr_t>(buffer.data)};
  }

  [[nodiscard]] bool may_read_processes() const noexcept override {
    return group_->reads_processes();
  }

  [[nodiscard]] bool read(int peer, const MessagePlace& place,
                          std::span<std::byte> target) const override {
    const bool is_read = place.in == MessagePlace::In::kSharedHeap
                             ? read_heap(peer, place.address, target)
                             : read_process(peer, place.address, target);
    if (!is_read) {
      return false;
    }
    // A sender that has raised, or left, has its memory to itself again.
    require_right_reads(*group_);
    return !has_left(*group_, peer);
  }

 private:
  [[nodiscard]] bool read_heap(int peer, HeapReference reference,
                               std::span<std::byte> target) const {
    const HeapWindow* const window = group_->window(peer);
    // It may be a moment behind the sender's.
    if (window == nullptr || !window->is_on() || !window->has(reference, target.size())) {
      return false;
    }
    std::memcpy(target.data(), window->address(reference), target.size());
    return true;
  }

  [[nodiscard]] bool read_process(int peer, std::uint64_t address,
                                  std::span<std::byte> target) const {
    return group_->reads_processes() &&
           group_->process(peer).read(target.data(), address, target.size()) == 0;
  }

  const std::shared_ptr<const Group> group_;
};

}  // namespace

std::unique_ptr<MessageReads> message_reads(std::shared_ptr<const Group> group) {
  return std::make_unique<ReadsInGroup>(std::move(group));
}

}  // namespace pydist
