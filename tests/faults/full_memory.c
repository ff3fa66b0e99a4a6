/* Loaded ahead of the C library: lets the chosen one of the next reservations of shared memory fail
   as they do where none is left. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/types.h>

/* How many are left until the one that fails; below 1: none fails. */
static atomic_int left;
static atomic_int failed;

void fail_reservation(int number) {
  failed = 0;
  left = number;
}

int has_failed(void) { return failed; }

typedef int (*Reserve)(int, off_t, off_t);

int posix_fallocate(int fd, off_t offset, off_t length) {
  static Reserve original;
  if (original == 0) {
    original = (Reserve)dlsym(RTLD_NEXT, "posix_fallocate");
  }
  if (atomic_load(&left) > 0 && atomic_fetch_sub(&left, 1) == 1) {
    failed = 1;
    return ENOSPC;
  }
  return original(fd, offset, length);
}
