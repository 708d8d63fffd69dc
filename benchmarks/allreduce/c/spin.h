/* Barriers between processes in shared memory. */
#ifndef SPIN_H
#define SPIN_H

#include <stdint.h>

enum { SPIN_MAX_RANKS = 256, SPIN_LINE = 64 };

/* One rank's view of a barrier. The shared memory is zeroed: one cache line for each rank, then one for the sleepers.
 */
typedef struct spin {
  char* lines;
  uint64_t epoch;
  int rank, ranks, yields;
} spin_t;

/* Shared-memory bytes of one barrier. */
enum { SPIN_BYTES = (SPIN_MAX_RANKS + 1) * SPIN_LINE };

/* A barrier in zeroed shared memory. It yields the processor while it spins if `ranks` exceed the processors of this
 * process. */
spin_t spin_make(void* shared, int rank, int ranks);

/* Spins until all ranks have called it as often as this rank. */
void spin_wait(spin_t* spin);

/* A barrier after an operation: sleeps until all ranks have arrived, because the missing ranks may need the processors
 * or work of other ranks' threads. Then it spins, so that all ranks continue at the same time. */
void spin_synchronize(spin_t* spin);

/* For Python: a barrier in the file `path` of SPIN_BYTES zeroed bytes. NULL on failure. */
spin_t* spin_open(const char* path, int rank, int ranks);

#endif
