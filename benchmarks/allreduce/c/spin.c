/* The barriers of spin.h: every rank counts its calls in its own cache line and reads those of the others. */
#define _GNU_SOURCE
#include "spin.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* State of the sleeping barrier: arrived ranks, sleeping ranks, completed barriers. */
typedef struct barrier_state {
  _Atomic uint32_t arrived, sleepers, completed;
} barrier_state_t;

enum { SPIN_AWAKE_NS = 5000 };

static uint64_t nanoseconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

spin_t spin_make(void* shared, int rank, int ranks) {
  cpu_set_t allowed;
  int processors = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  return (spin_t){.lines = shared, .rank = rank, .ranks = ranks, .yields = ranks > processors};
}

void spin_wait(spin_t* spin) {
  uint64_t epoch = ++spin->epoch;
  atomic_store_explicit((_Atomic uint64_t*)(spin->lines + spin->rank * SPIN_LINE), epoch, memory_order_release);
  for (int rank = 0; rank < spin->ranks; ++rank) {
    _Atomic uint64_t* line = (_Atomic uint64_t*)(spin->lines + rank * SPIN_LINE);
    while (atomic_load_explicit(line, memory_order_acquire) < epoch) {
      if (spin->yields)
        sched_yield();
      else
        pause_briefly();
    }
  }
}

/* Waits until all ranks have arrived; sleeps after SPIN_AWAKE_NS. The last rank wakes the others. */
static void barrier_sleep(spin_t* spin) {
  barrier_state_t* barrier_state = (barrier_state_t*)(spin->lines + SPIN_MAX_RANKS * SPIN_LINE);
  const uint32_t before = atomic_load(&barrier_state->completed);
  if (atomic_fetch_add(&barrier_state->arrived, 1) + 1 == (uint32_t)spin->ranks) {
    atomic_store(&barrier_state->arrived, 0);
    atomic_store(&barrier_state->completed, before + 1);
    if (atomic_load(&barrier_state->sleepers))
      syscall(SYS_futex, &barrier_state->completed, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return;
  }
  const uint64_t until = nanoseconds() + SPIN_AWAKE_NS;
  while (atomic_load(&barrier_state->completed) == before && nanoseconds() < until) sched_yield();
  atomic_fetch_add(&barrier_state->sleepers, 1);
  while (atomic_load(&barrier_state->completed) == before)
    syscall(SYS_futex, &barrier_state->completed, FUTEX_WAIT, before, NULL, NULL, 0);
  atomic_fetch_sub(&barrier_state->sleepers, 1);
}

void spin_synchronize(spin_t* spin) {
  barrier_sleep(spin);
  spin_wait(spin);
}

spin_t* spin_open(const char* path, int rank, int ranks) {
  if (ranks > SPIN_MAX_RANKS) return NULL;
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return NULL;
  void* shared = mmap(NULL, SPIN_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  spin_t* spin = malloc(sizeof *spin);
  if (shared == MAP_FAILED || !spin) {
    free(spin);
    return NULL;
  }
  *spin = spin_make(shared, rank, ranks);
  return spin;
}
