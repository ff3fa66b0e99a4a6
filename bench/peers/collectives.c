// Collectives of an MPI from C, timed exactly as ../engine.cc times the engine: a call, a barrier,
// a batch of calls, the time of the slowest rank; the arms take turns; medians over turns.
//
//   mpiexec -n 2 pydist-collectives KIND SMALLEST LARGEST SECONDS
//
// KIND is all_reduce, reduce_scatter, all_gather, broadcast or all_to_all, sums of float32 where it
// reduces. Every power of 2 from SMALLEST to LARGEST is timed, for SECONDS each: bytes of the
// larger one of the buffers that a rank gives and gets. The arms are in place and out of place;
// MPI_Bcast, which is always in place, has another buffer in the second one. Ranks pin themselves
// to a core each (round robin), so mpiexec has to leave them unbound. Every element of a result is
// checked, once a size, before anything is timed. The first line names the library, the second the
// columns.

#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kInPlace, kOutOfPlace, kArms };
static const char* const kArmNames[kArms] = {"in place", "out of place"};

typedef enum { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAllToAll, kKinds } Kind;
static const char* const kKindNames[kKinds] = {"all_reduce", "reduce_scatter", "all_gather",
                                               "broadcast", "all_to_all"};

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

// Each block has `count` floats; all_reduce and broadcast are of one.
static void call(Kind kind, int arm, const Buffers* buffers, int count) {
  const int is_in_place = arm == kInPlace;
  float* const mine = buffers->in_place;
  const void* const input = is_in_place ? MPI_IN_PLACE : (const void*)buffers->input;
  float* const output = is_in_place ? mine : buffers->output;
  const MPI_Comm world = MPI_COMM_WORLD;
  switch (kind) {
    case kAllReduce:
      MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, world);
      break;
    case kReduceScatter:
      MPI_Reduce_scatter_block(input, output, count, MPI_FLOAT, MPI_SUM, world);
      break;
    case kAllGather:
      MPI_Allgather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, world);
      break;
    case kBroadcast:
      MPI_Bcast(output, count, MPI_FLOAT, 0, world);
      break;
    default:
      MPI_Alltoall(input, count, MPI_FLOAT, output, count, MPI_FLOAT, world);
      break;
  }
}

// How many blocks a rank gives and gets.
static int blocks_given(Kind kind) {
  return kind == kReduceScatter || kind == kAllToAll ? ranks : 1;
}
static int blocks_got(Kind kind) { return kind == kAllGather || kind == kAllToAll ? ranks : 1; }
static int blocks_of(Kind kind) { return kind == kAllReduce || kind == kBroadcast ? 1 : ranks; }

// Small integers, which every order of summation adds up exactly: what a rank gives in a block.
static float contribution(int of_rank, int block, int index) {
  return (float)((of_rank + 1) * (index % 7 + 1) + block);
}

static float expected(Kind kind, int block, int index) {
  float sum = 0;
  switch (kind) {
    case kAllReduce:
    case kReduceScatter:
      for (int of_rank = 0; of_rank < ranks; ++of_rank) {
        sum += contribution(of_rank, kind == kAllReduce ? 0 : rank, index);
      }
      return sum;
    case kAllGather:
      return contribution(block, 0, index);
    case kBroadcast:
      return contribution(0, 0, index);
    default:
      return contribution(block, rank, index);
  }
}

static void check(Kind kind, int arm, const Buffers* buffers, int count) {
  const size_t stride = (size_t)count;
  float* input = arm == kInPlace ? buffers->in_place : buffers->input;
  float* output = arm == kInPlace ? buffers->in_place : buffers->output;
  if (kind == kBroadcast) {
    input = output;
  } else if (kind == kAllGather && arm == kInPlace) {
    input += (size_t)rank * stride;
  }
  for (int block = 0; block < blocks_given(kind); ++block) {
    for (int i = 0; i < count; ++i) {
      input[(size_t)block * stride + (size_t)i] =
          kind == kBroadcast && rank != 0 ? 0 : contribution(rank, block, i);
    }
  }
  call(kind, arm, buffers, count);
  for (int block = 0; block < blocks_got(kind); ++block) {
    for (int i = 0; i < count; ++i) {
      const float got = output[(size_t)block * stride + (size_t)i];
      if (got != expected(kind, block, i)) {
        char message[160];
        snprintf(message, sizeof message,
                 "%s, %s, %d elements: element %d of block %d is %g instead of %g",
                 kKindNames[kind], kArmNames[arm], count, i, block, (double)got,
                 (double)expected(kind, block, i));
        fail(message);
      }
    }
  }
}

// Rank 0 decides, so that all stop together.
static int keep_going(double start, double seconds, size_t calls) {
  int more = now() - start < seconds || calls < 5;
  MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return more;
}

static void measure_size(Kind kind, size_t bytes, double seconds, const Buffers* buffers) {
  const int count = (int)(bytes / sizeof(float)) / blocks_of(kind);
  // As bench/engine.cc does.
  const int batch = bytes <= 4096 ? 100 : bytes <= 65536 ? 10 : bytes <= 1 << 20 ? 4 : 1;
  Times times[kArms] = {0};
  for (int arm = 0; arm < kArms; ++arm) {
    check(kind, arm, buffers, count);
    // Sums of zeros stay zeros, however often they are taken.
    memset(buffers->in_place, 0, bytes);
    memset(buffers->input, 0, bytes);
    memset(buffers->output, 0, bytes);
    call(kind, arm, buffers, count);
  }
  const double warm_up = now();
  for (size_t calls = 0; keep_going(warm_up, seconds, calls); ++calls) {
    for (int arm = 0; arm < kArms; ++arm) {
      call(kind, arm, buffers, count);
    }
  }
  const double start = now();
  while (keep_going(start, seconds, times[0].count)) {
    for (int arm = 0; arm < kArms; ++arm) {
      call(kind, arm, buffers, count);
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin = now();
      for (int i = 0; i < batch; ++i) {
        call(kind, arm, buffers, count);
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
  Kind kind = kKinds;
  for (int each = 0; argc == 5 && each < kKinds; ++each) {
    if (strcmp(argv[1], kKindNames[each]) == 0) {
      kind = (Kind)each;
    }
  }
  const size_t smallest = argc == 5 ? strtoull(argv[2], NULL, 10) : 0;
  const size_t largest = argc == 5 ? strtoull(argv[3], NULL, 10) : 0;
  const double seconds = argc == 5 ? atof(argv[4]) : 0;
  if (kind == kKinds || smallest < sizeof(float) * (size_t)blocks_of(kind) || largest < smallest) {
    fail("usage: pydist-collectives KIND SMALLEST LARGEST SECONDS; a block has a float at least");
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
  for (size_t bytes = smallest; bytes <= largest; bytes *= 2) {
    measure_size(kind, bytes, seconds, &buffers);
  }
  free(buffers.in_place);
  free(buffers.input);
  free(buffers.output);
  MPI_Finalize();
  return 0;
}
