#include "memory/heap_forks.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/memory_room.h"
#include "memory/shared_segment.h"

namespace pydist {
namespace {

// Whole pages of a heap that hold blocks in use.
struct Pages {
  const SharedSegment* segment = nullptr;
  std::size_t begin = 0;
  std::size_t end = 0;
};

void close_both(int (&pipe)[2]) noexcept {
  for (int& end : pipe) {
    if (end >= 0) {
      ::close(std::exchange(end, -1));
    }
  }
}

void write_to_stderr(const std::string& text) noexcept {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (count <= 0 && errno != EINTR) {
      return;
    }
    done += count > 0 ? static_cast<std::size_t>(count) : 0;
  }
}

}  // namespace

struct HeapForks::State {
  std::mutex mutex;
  std::vector<AllocationHeap*> heaps;       // guarded by mutex
  std::shared_ptr<AllocationHeap> current;  // guarded by mutex
  // All heaps that there have been lie between these: most addresses that are asked for lie
  // outside.
  std::atomic<std::uintptr_t> lowest{~std::uintptr_t{0}};
  std::atomic<std::uintptr_t> highest{0};
  // Of the fork under way, which holds the mutex. The parent fills all of it in: a child must not
  // wait for what another thread of the parent's may have held.
  std::vector<Pages> copied;
  std::string last_words;  // of a child whose copy fails
  bool is_hopeless = false;
  int pipe[2] = {-1, -1};  // its end says that the child has its copy, or has died
};

HeapForks::State& HeapForks::state() {
  static auto& the_state = *new State;  // outlives static destruction, as heaps may
  return the_state;
}

void HeapForks::add(AllocationHeap& heap) {
  [[maybe_unused]] static const int is_watching =
      ::pthread_atfork(before, after_in_parent, after_in_child);
  const std::lock_guard lock(state().mutex);
  state().heaps.push_back(&heap);
  const auto begin = reinterpret_cast<std::uintptr_t>(heap.segment_.data());
  state().lowest.store(std::min(state().lowest.load(), begin));
  state().highest.store(std::max(state().highest.load(), begin + heap.segment_.bytes()));
}

void HeapForks::remove(AllocationHeap& heap) noexcept {
  const std::lock_guard lock(state().mutex);
  std::erase(state().heaps, &heap);
}

std::shared_ptr<AllocationHeap> HeapForks::find(const void* address) noexcept {
  const auto place = reinterpret_cast<std::uintptr_t>(address);
  if (place < state().lowest.load(std::memory_order_relaxed) ||
      place >= state().highest.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const std::lock_guard lock(state().mutex);
  for (AllocationHeap* const heap : state().heaps) {
    if (heap->contains(address)) {
      return heap->weak_from_this().lock();
    }
  }
  return nullptr;
}

std::shared_ptr<AllocationHeap> HeapForks::current() noexcept {
  if (state().highest.load(std::memory_order_relaxed) == 0) {
    return nullptr;  // there has never been a heap, nor do forks wait for the lock yet
  }
  const std::lock_guard lock(state().mutex);
  return state().current;
}

void HeapForks::set_current(std::shared_ptr<AllocationHeap> heap) noexcept {
  // The previous one is dropped without the lock, which its destructor takes.
  const std::lock_guard lock(state().mutex);
  state().current.swap(heap);
}

// Holds all locks until the fork is over, so that no thread that does not exist in the child holds
// one there.
void HeapForks::before() noexcept {
  State& now = state();
  now.mutex.lock();
  for (AllocationHeap* const heap : now.heaps) {
    heap->mutex_.lock();
  }
  now.copied.clear();
  now.is_hopeless = false;
  std::size_t bytes = 0;
  try {
    for (const AllocationHeap* const heap : now.heaps) {
      // What a child has inherited is its own already, copy on write.
      if (heap->birth_.is_inherited()) {
        continue;
      }
      std::vector<std::pair<std::size_t, std::size_t>> blocks(heap->used_.begin(),
                                                              heap->used_.end());
      std::sort(blocks.begin(), blocks.end());
      for (const auto& [offset, size] : blocks) {
        const std::size_t begin = offset / page_bytes() * page_bytes();
        const std::size_t end = round_up(offset + size, page_bytes());
        if (!now.copied.empty() && now.copied.back().segment == &heap->segment_ &&
            begin <= now.copied.back().end) {
          now.copied.back().end = end;
        } else {
          now.copied.push_back({&heap->segment_, begin, end});
        }
      }
    }
    for (const Pages& pages : now.copied) {
      bytes += pages.end - pages.begin;
    }
    if (now.copied.empty()) {
      return;
    }
    now.last_words = join(
        "pydist: process ", ::getpid(), " has forked a child that needs a copy of ", bytes >> 10,
        " KiB of tensors from share_allocations(), and there is no room for it. The child ends. "
        "Free memory before the fork, start fewer workers, start them before the tensors are made, "
        "or use the 'spawn' method.\n");
    check_memory_room(bytes, "the copy of a forked child");
    now.is_hopeless = ::pipe2(now.pipe, O_CLOEXEC) != 0;
  } catch (const std::exception&) {
    now.is_hopeless = true;
  }
}

void HeapForks::after_in_parent() noexcept {
  State& now = state();
  if (now.pipe[0] >= 0) {
    ::close(std::exchange(now.pipe[1], -1));
    char nothing = 0;
    while (::read(now.pipe[0], &nothing, 1) < 0 && errno == EINTR) {
    }
    close_both(now.pipe);
  }
  for (AllocationHeap* const heap : now.heaps) {
    heap->mutex_.unlock();
  }
  now.mutex.unlock();
}

void HeapForks::after_in_child() noexcept {
  State& now = state();
  bool is_copied = !now.is_hopeless;
  for (const Pages& pages : now.copied) {
    is_copied =
        is_copied && pages.segment->try_make_private(pages.begin, pages.end - pages.begin) == 0;
  }
  if (!is_copied) {
    write_to_stderr(now.last_words);
    ::_exit(1);
  }
  close_both(now.pipe);
  for (AllocationHeap* const heap : now.heaps) {
    heap->mutex_.unlock();
  }
  now.mutex.unlock();
}

}  // namespace pydist
