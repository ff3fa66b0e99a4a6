// Receives from a socket through io_uring, by the system's own calls: one for each receive, where
// epoll takes two.

#pragma once

#include <errno.h>
#include <linux/io_uring.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct {
  int fd;
  unsigned* submitted;
  unsigned submitted_mask;
  unsigned* places;
  struct io_uring_sqe* requests;
  unsigned* taken;
  unsigned* completed;
  unsigned completed_mask;
  struct io_uring_cqe* completions;
} Uring;

// Returns 0, or -1 where the system has none or allows none; then errno says why.
static inline int uring_open(Uring* ring) {
  struct io_uring_params params;
  memset(&params, 0, sizeof params);
  ring->fd = (int)syscall(__NR_io_uring_setup, 4, &params);
  if (ring->fd < 0) {
    return -1;
  }
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) {
    errno = ENOSYS;
    return -1;
  }
  const size_t of_requests = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const size_t of_completions =
      params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
  const int access = PROT_READ | PROT_WRITE;
  char* rings = mmap(NULL, of_requests > of_completions ? of_requests : of_completions, access,
                     MAP_SHARED | MAP_POPULATE, ring->fd, IORING_OFF_SQ_RING);
  ring->requests = mmap(NULL, params.sq_entries * sizeof(struct io_uring_sqe), access,
                        MAP_SHARED | MAP_POPULATE, ring->fd, IORING_OFF_SQES);
  if (rings == MAP_FAILED || (void*)ring->requests == MAP_FAILED) {
    return -1;
  }
  ring->submitted = (unsigned*)(rings + params.sq_off.tail);
  ring->submitted_mask = *(unsigned*)(rings + params.sq_off.ring_mask);
  ring->places = (unsigned*)(rings + params.sq_off.array);
  ring->taken = (unsigned*)(rings + params.cq_off.head);
  ring->completed = (unsigned*)(rings + params.cq_off.tail);
  ring->completed_mask = *(unsigned*)(rings + params.cq_off.ring_mask);
  ring->completions = (struct io_uring_cqe*)(rings + params.cq_off.cqes);
  return 0;
}

// As recv(): sleeps until something has come.
static inline ssize_t uring_receive(Uring* ring, int socket, void* data, size_t size) {
  const unsigned place = *ring->submitted & ring->submitted_mask;
  struct io_uring_sqe* request = &ring->requests[place];
  memset(request, 0, sizeof *request);
  request->opcode = IORING_OP_RECV;
  request->fd = socket;
  request->addr = (uint64_t)(uintptr_t)data;
  request->len = (uint32_t)size;
  ring->places[place] = place;
  __atomic_store_n(ring->submitted, *ring->submitted + 1, __ATOMIC_RELEASE);
  if (syscall(__NR_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0) {
    return -1;
  }
  const unsigned taken = *ring->taken;
  if (taken == __atomic_load_n(ring->completed, __ATOMIC_ACQUIRE)) {
    errno = EINTR;
    return -1;
  }
  const int result = ring->completions[taken & ring->completed_mask].res;
  __atomic_store_n(ring->taken, taken + 1, __ATOMIC_RELEASE);
  if (result < 0) {
    errno = -result;
    return -1;
  }
  return result;
}
