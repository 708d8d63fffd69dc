/* The memory-bandwidth limit: all buffers lie in shared memory, in huge pages if available. Each process reads its
 * share of all buffers and writes the mean to all, between two spin barriers, without staging, checks or matching. A
 * list of tensors is one buffer. `limit RANKS` forks all ranks.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "trial.h"
#include "vector.h"

enum { LINE = 64 };
static const size_t room = (size_t)8 << 30; /* Address space of a rank; pages are allocated on first use. */

static char* base;
static spin_t inside;
static int rank, ranks;
static size_t used, taken;

static char* region(int r) { return base + (size_t)r * room; }

/* Averages whole vectors over the ranks and writes the means to all. */
#define AVERAGE(type, vector, real, step)                                  \
  VECTOR void average_##type(char* const* at, size_t bytes, const int n) { \
    const real share = (real)1 / (real)n;                                  \
    for (size_t i = 0; i < bytes; i += (step)) {                           \
      vector sum = load_##type(at[0] + i);                                 \
      for (int r = 1; r < n; ++r) sum += load_##type(at[r] + i);           \
      sum *= share;                                                        \
      for (int r = 0; r < n; ++r) store_##type(at[r] + i, sum);            \
    }                                                                      \
  }                                                                        \
  static void averages_##type(char* const* at, size_t bytes) {             \
    switch (ranks) {                                                       \
      case 2:                                                              \
        average_##type(at, bytes, 2);                                      \
        break;                                                             \
      case 3:                                                              \
        average_##type(at, bytes, 3);                                      \
        break;                                                             \
      case 4:                                                              \
        average_##type(at, bytes, 4);                                      \
        break;                                                             \
      default:                                                             \
        average_##type(at, bytes, ranks);                                  \
    }                                                                      \
  }
AVERAGE(f32, float16v, float, 64)
AVERAGE(f64, double8v, double, 64)
AVERAGE(f16, float16v, float, 32)
AVERAGE(bf16, float16v, float, 32)

static void average(const trial_t* trial, void** tensors) {
  static void (*const averages[ELEMENTS])(char* const*, size_t) = {averages_f32, averages_f64, averages_f16,
                                                                   averages_bf16};
  const size_t last = trial->tensors - 1, size = element_sizes[trial->type];
  const size_t begin = (size_t)((char*)tensors[0] - region(rank));
  const size_t end = (size_t)((char*)tensors[last] - region(rank)) + trial->lengths[last] * size;
  const size_t lines = (end - begin + LINE - 1) / LINE;
  const size_t from = lines * (size_t)rank / (size_t)ranks, to = lines * (size_t)(rank + 1) / (size_t)ranks;
  char* at[SPIN_MAX_RANKS];
  for (int r = 0; r < ranks; ++r) at[r] = region(r) + begin + from * LINE;
  spin_wait(&inside);
  averages[trial->type](at, (to - from) * LINE);
  spin_wait(&inside);
}

static void* alloc(size_t bytes) {
  /* Align large tensors to pages, like an allocator. */
  const size_t align = bytes >= 4096 ? 4096 : LINE;
  size_t begin = (used + align - 1) / align * align;
  if (begin + bytes + LINE > room) return NULL;
  used = begin + (bytes + LINE - 1) / LINE * LINE;
  ++taken;
  return region(rank) + begin;
}

static void release(void* tensor) {
  (void)tensor;
  if (--taken) return;
  size_t whole = (used + 4095) / 4096 * 4096;
  if (madvise(region(rank), whole, MADV_REMOVE)) fail("limit", "madvise(MADV_REMOVE) failed");
  used = 0;
}

int main(int argc, char** argv) {
  ranks = argc == 2 ? atoi(argv[1]) : 0;
  if (ranks < 1 || ranks > SPIN_MAX_RANKS) fail("usage", "limit RANKS");
  const int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
  base = mmap(NULL, room * (size_t)ranks, PROT_READ | PROT_WRITE, flags, -1, 0);
  void* shared = mmap(NULL, SPIN_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (base == MAP_FAILED || shared == MAP_FAILED) fail("limit", "no shared memory");
  madvise(base, room * (size_t)ranks, MADV_HUGEPAGE); /* Optional. */
  for (rank = 0; rank < ranks - 1; ++rank) {
    pid_t child = fork();
    if (child < 0) fail("limit", "cannot fork");
    if (child == 0) break;
  }
  inside = spin_make(shared, rank, ranks);
  trials_serve(&(contender_t){.rank = rank, .ranks = ranks, .alloc = alloc, .release = release, .average = average});
  if (rank == ranks - 1)
    while (wait(NULL) > 0) continue;
  return 0;
}
