#include "memory/allocation_heap.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "memory/heap_forks.h"

namespace pydist {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr const char* kWhatFor = "tensors within share_allocations()";

// How many operations make a period. A training step of a few hundred tensors is far shorter.
constexpr std::uint64_t kPeriod = 4096;
// So much more than was needed lately is kept.
constexpr std::size_t kSpareBytes = std::size_t{64} << 20;
// So many bytes of freed blocks, and a quarter of what is in use, wait for requests of their very
// sizes before they become free for others.
constexpr std::size_t kMostKeptBytes = std::size_t{16} << 20;
// Where the machine has had no room, so many operations pass before the next attempt: each looks at
// files of the system.
constexpr std::uint64_t kPause = 256;

// Sizes that differ little are one, so that a freed block serves the next request.
std::size_t rounded(std::size_t bytes) noexcept {
  bytes = std::max<std::size_t>(bytes, 1);
  if (bytes < std::size_t{64} << 10) {
    return round_up(bytes, 2 * kAlignment);
  }
  return round_up(bytes,
                  bytes < std::size_t{1} << 20 ? std::size_t{4} << 10 : std::size_t{64} << 10);
}

}  // namespace

AllocationHeap::AllocationHeap(std::size_t bytes)
    : segment_(SharedSegment::create("allocations", bytes)),
      free_(bytes, kAlignment),
      is_reserved_(bytes / kGrainBytes) {
  // Where the system has huge pages for shared memory on request (shmem_enabled "advise").
  static_cast<void>(::madvise(segment_.data(), segment_.bytes(), MADV_HUGEPAGE));
}

std::shared_ptr<AllocationHeap> AllocationHeap::create(std::size_t max_bytes) {
  // Offsets fit into a reference, and sums of them into a size.
  constexpr std::size_t kMostBytes = std::size_t{1} << 46;
  if (max_bytes == 0 || max_bytes > kMostBytes) {
    throw InvalidUsage(
        join("A heap for allocations can have 1 to ", kMostBytes, " bytes, not ", max_bytes, "."));
  }
  std::shared_ptr<AllocationHeap> heap(new AllocationHeap(round_up(max_bytes, kGrainBytes)));
  HeapForks::add(*heap);
  return heap;
}

AllocationHeap::~AllocationHeap() { HeapForks::remove(*this); }

std::shared_ptr<AllocationHeap> AllocationHeap::of(const void* address) noexcept {
  return HeapForks::find(address);
}

std::shared_ptr<AllocationHeap> AllocationHeap::current() noexcept { return HeapForks::current(); }

void AllocationHeap::set_current(std::shared_ptr<AllocationHeap> heap) noexcept {
  HeapForks::set_current(std::move(heap));
}

FileDescriptor AllocationHeap::read_only_descriptor() const {
  // Opened anew: a duplicate would have the rights of the original. Whoever has only this one can
  // neither map the heap for writing nor make a mapping of it writable.
  const std::string path = join("/proc/self/fd/", segment_.fd());
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) {
    throw system_error(join("Cannot open shared memory for reading (", path, ")"), errno);
  }
  return fd;
}

std::byte* AllocationHeap::allocate(std::size_t bytes) noexcept {
  if (birth_.is_inherited()) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  try {
    return take(bytes);
  } catch (const std::exception&) {
    return nullptr;  // no memory for the bookkeeping
  }
}

std::byte* AllocationHeap::take(std::size_t bytes) {
  if (bytes > segment_.bytes()) {
    return nullptr;  // before rounding it up could overflow
  }
  const std::size_t size = rounded(bytes);
  // What may throw comes first: from here on nothing gets lost.
  used_.reserve(used_.size() + 1);
  std::size_t offset = 0;
  const auto kept = freed_.find(size);
  if (kept != freed_.end() && !kept->second.empty()) {
    offset = kept->second.back();
    kept->second.pop_back();
    kept_bytes_ -= size;
  } else {
    if (kept_bytes_ > kMostKeptBytes + used_bytes_ / 4) {
      forget_sizes();
    }
    std::optional<std::size_t> place = free_.allocate(size);
    if (!place) {
      forget_sizes();
      place = free_.allocate(size);
    }
    if (!place) {
      return nullptr;
    }
    offset = *place;
    if (!reserve(offset, size)) {
      free_.release(offset, size);
      return nullptr;
    }
  }
  used_.emplace(offset, size);
  used_bytes_ += size;
  if (itself_ == nullptr) {
    itself_ = shared_from_this();
  }
  count_operation();
  return segment_.data() + offset;
}

void AllocationHeap::release(std::byte* block) noexcept {
  if (birth_.is_inherited()) {
    return;  // a copy of the tensor dies here; the parent's own lives on
  }
  std::shared_ptr<AllocationHeap> last;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::size_t>(block - segment_.data());
  const auto found = used_.find(offset);
  if (found == used_.end()) {
    return;  // it has been freed before, and nothing here may throw
  }
  const std::size_t size = found->second;
  used_.erase(found);
  used_bytes_ -= size;
  try {
    freed_[size].push_back(offset);
    kept_bytes_ += size;
  } catch (const std::bad_alloc&) {
    free_.release(offset, size);
  }
  count_operation();
  if (used_.empty()) {
    last = std::move(itself_);
  }
}

// Backs a range that is about to be handed out.
bool AllocationHeap::reserve(std::size_t offset, std::size_t bytes) {
  const std::size_t end = (offset + bytes + kGrainBytes - 1) / kGrainBytes;
  for (std::size_t grain = offset / kGrainBytes; grain < end; ++grain) {
    if (is_reserved_[grain]) {
      continue;
    }
    std::size_t behind = grain + 1;
    while (behind < end && !is_reserved_[behind]) {
      ++behind;
    }
    const std::size_t length = (behind - grain) * kGrainBytes;
    if (operations_ < next_attempt_) {
      return false;
    }
    try {
      segment_.reserve(grain * kGrainBytes, length, kWhatFor);
    } catch (const TransportError&) {
      next_attempt_ = operations_ + kPause;
      return false;
    }
    segment_.populate(grain * kGrainBytes, length);
    std::fill(is_reserved_.begin() + static_cast<std::ptrdiff_t>(grain),
              is_reserved_.begin() + static_cast<std::ptrdiff_t>(behind), true);
    reserved_bytes_ += length;
    grain = behind - 1;
  }
  return true;
}

// Lets freed blocks of all sizes become free ranges, which merge.
void AllocationHeap::forget_sizes() {
  for (const auto& [size, offsets] : freed_) {
    for (const std::size_t offset : offsets) {
      free_.release(offset, size);
    }
  }
  freed_.clear();
  kept_bytes_ = 0;
}

// Gives grains back in which nothing is in use, until no more than `most_bytes` are reserved.
void AllocationHeap::give_back(std::size_t most_bytes) noexcept {
  try {
    forget_sizes();
    free_.for_each_free([&](std::size_t offset, std::size_t bytes) {
      const std::size_t end = (offset + bytes) / kGrainBytes;
      for (std::size_t grain = round_up(offset, kGrainBytes) / kGrainBytes;
           grain < end && reserved_bytes_ > most_bytes; ++grain) {
        if (is_reserved_[grain]) {
          segment_.discard(grain * kGrainBytes, kGrainBytes);
          is_reserved_[grain] = false;
          reserved_bytes_ -= kGrainBytes;
        }
      }
    });
  } catch (const std::bad_alloc&) {
    // Then later.
  }
}

// At the end of a period, what has been needed in it or in the one before stays; a pattern that
// repeats itself thus reserves its memory once.
void AllocationHeap::count_operation() noexcept {
  most_used_ = std::max(most_used_, used_bytes_);
  if (++operations_ % kPeriod != 0) {
    return;
  }
  const std::size_t needed = std::max(most_used_, most_used_before_) + kSpareBytes;
  if (reserved_bytes_ > needed + kSpareBytes) {
    give_back(needed);
  }
  most_used_before_ = std::exchange(most_used_, used_bytes_);
}

void AllocationHeap::trim() noexcept {
  if (birth_.is_inherited()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  give_back(0);
}

std::size_t AllocationHeap::used_bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::size_t AllocationHeap::reserved_bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return reserved_bytes_;
}

}  // namespace pydist
