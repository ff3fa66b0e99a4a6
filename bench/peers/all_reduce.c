// MPI_Allreduce from C, timed exactly as ../engine.cc times the engine: a barrier, a batch of
// calls, the time of the slowest rank, a barrier; the arms take turns; medians over calls.
//
//   mpiexec -n 2 pydist-all-reduce [largest=268435456] [seconds per size=0.5]
//
// The arms are a sum of float32 in place and out of place. Ranks pin themselves to a core each
// (round robin), so mpiexec has to leave them unbound. Every element of a result is checked, once a
// size, before anything is timed. The first line names the library, the second the columns.

#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kInPlace, kOutOfPlace, kArms };
static const char* const kArmNames[kArms] = {"in place", "out of place"};

typedef struct {
  float* in_place;
  float* input;
  float* output;
} Buffers;

typedef struct {
  double* values;
  size_t count;
  size_t capacity;
} Times;

static int rank;
static int ranks;

static void fail(const char* message) {
  fprintf(stderr, "rank %d: %s\n", rank, message);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static void* allocate(size_t bytes) {
  void* data = malloc(bytes);
  if (data == NULL) {
    fail("out of memory");
  }
  return data;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void append(Times* times, double value) {
  if (times->count == times->capacity) {
    times->capacity = times->capacity == 0 ? 1024 : times->capacity * 2;
    times->values = realloc(times->values, times->capacity * sizeof(double));
    if (times->values == NULL) {
      fail("out of memory");
    }
  }
  times->values[times->count++] = value;
}

static int compare(const void* left, const void* right) {
  const double a = *(const double*)left;
  const double b = *(const double*)right;
  return (a > b) - (a < b);
}

static double median(Times* times) {
  qsort(times->values, times->count, sizeof(double), compare);
  return times->values[times->count / 2];
}

static void pin(void) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  int wanted = rank % CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) && wanted-- == 0) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      sched_setaffinity(0, sizeof one, &one);
      return;
    }
  }
}

static void all_reduce(int arm, const Buffers* buffers, int count) {
  if (arm == kInPlace) {
    MPI_Allreduce(MPI_IN_PLACE, buffers->in_place, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else {
    MPI_Allreduce(buffers->input, buffers->output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
}

// Small integers, which every order of summation adds up exactly.
static float contribution(int of_rank, int index) {
  return (float)((of_rank + 1) * (index % 7 + 1));
}

static void check(int arm, const Buffers* buffers, int count) {
  float* input = arm == kInPlace ? buffers->in_place : buffers->input;
  float* output = arm == kInPlace ? buffers->in_place : buffers->output;
  for (int i = 0; i < count; ++i) {
    input[i] = contribution(rank, i);
  }
  all_reduce(arm, buffers, count);
  for (int i = 0; i < count; ++i) {
    const float expected = (float)(ranks * (ranks + 1) / 2) * contribution(0, i);
    if (output[i] != expected) {
      char message[160];
      snprintf(message, sizeof message, "%s, %d elements: element %d is %g instead of %g",
               kArmNames[arm], count, i, (double)output[i], (double)expected);
      fail(message);
    }
  }
  // Sums of zeros stay zeros, however often they are taken.
  memset(input, 0, (size_t)count * sizeof(float));
  memset(output, 0, (size_t)count * sizeof(float));
}

// Rank 0 decides, so that all stop together.
static int keep_going(double start, double seconds, size_t calls) {
  int more = now() - start < seconds || calls < 5;
  MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return more;
}

static void measure_size(size_t bytes, double seconds, const Buffers* buffers) {
  const int count = (int)(bytes / sizeof(float));
  // Small calls are timed in batches: the clock costs as much as they do.
  const int batch = bytes <= 4096 ? 100 : bytes <= 65536 ? 10 : 1;
  Times times[kArms] = {0};
  for (int arm = 0; arm < kArms; ++arm) {
    check(arm, buffers, count);
    all_reduce(arm, buffers, count);
  }
  const double start = now();
  while (keep_going(start, seconds, times[0].count)) {
    for (int arm = 0; arm < kArms; ++arm) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin = now();
      for (int i = 0; i < batch; ++i) {
        all_reduce(arm, buffers, count);
      }
      double slowest = (now() - begin) / batch;
      MPI_Allreduce(MPI_IN_PLACE, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      append(&times[arm], slowest);
    }
  }
  if (rank == 0) {
    printf("%12zu %12.3f %12.3f %12zu\n", bytes, median(&times[kInPlace]) * 1e6,
           median(&times[kOutOfPlace]) * 1e6, times[0].count * (size_t)batch);
    fflush(stdout);
  }
  for (int arm = 0; arm < kArms; ++arm) {
    free(times[arm].values);
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  pin();
  size_t largest = (size_t)256 << 20;
  double seconds = 0.5;
  if (argc > 1) {
    largest = strtoull(argv[1], NULL, 10);
  }
  if (argc > 2) {
    seconds = atof(argv[2]);
  }
  if (largest < 8) {
    largest = 8;
  }
  if (rank == 0) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    printf("# %.*s\n", (int)strcspn(version, "\n"), version);
    printf("%12s %12s %12s %12s\n", "bytes", "in place us", "out us", "calls");
  }
  Buffers buffers = {allocate(largest), allocate(largest), allocate(largest)};
  memset(buffers.in_place, 0, largest);
  memset(buffers.input, 0, largest);
  memset(buffers.output, 0, largest);
  for (size_t bytes = 8; bytes <= largest; bytes *= 2) {
    measure_size(bytes, seconds, &buffers);
  }
  free(buffers.in_place);
  free(buffers.input);
  free(buffers.output);
  MPI_Finalize();
  return 0;
}
