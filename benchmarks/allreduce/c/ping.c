/* Prints the time, in nanoseconds, that a cache line takes from one of the first two processors to the other. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

enum { TRIPS = 100000 };

static _Alignas(128) atomic_int line;
static int processors[2];

static void run(int side) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processors[side], &set);
  sched_setaffinity(0, sizeof set, &set);
  for (int trip = 0; trip < TRIPS; ++trip) {
    while (atomic_load_explicit(&line, memory_order_acquire) != 2 * trip + side) continue;
    atomic_store_explicit(&line, 2 * trip + side + 1, memory_order_release);
  }
}

static void* other(void* unused) {
  run(1);
  return unused;
}

int main(void) {
  cpu_set_t allowed;
  int found = 0;
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) processors[found++] = cpu;
  if (found < 2) return fprintf(stderr, "there is one processor\n"), 1;
  pthread_t thread;
  struct timespec from, to;
  if (pthread_create(&thread, NULL, other, NULL)) return 1;
  clock_gettime(CLOCK_MONOTONIC, &from);
  run(0);
  pthread_join(thread, NULL);
  clock_gettime(CLOCK_MONOTONIC, &to);
  printf("%.0f\n", ((to.tv_sec - from.tv_sec) * 1e9 + to.tv_nsec - from.tv_nsec) / (2.0 * TRIPS));
  return 0;
}
