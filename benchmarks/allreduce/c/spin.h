/* Barriers of processes on memory that they share. */
#ifndef SPIN_H
#define SPIN_H

#include <stdint.h>

enum { SPIN_MAX_RANKS = 256, SPIN_LINE = 64 };

/* One rank's view of a barrier. The shared memory is zeroed; it has a cache line for each rank, then one for sleepers.
 */
typedef struct spin {
  char* lines;
  uint64_t epoch;
  int rank, ranks, yields;
} spin_t;

/* The bytes of shared memory that one barrier takes. */
enum { SPIN_BYTES = (SPIN_MAX_RANKS + 1) * SPIN_LINE };

/* A barrier on zeroed shared memory; it yields the processor while it spins when `ranks` outnumber the processors that
 * this process may use. */
spin_t spin_make(void* shared, int rank, int ranks);

/* Returns when all ranks have called it as often as this one. */
void spin_wait(spin_t* spin);

/* The same, for ranks that have ended an operation: the missing ones may need the processors, or what threads of those
 * that are here do for them, so who has waited a while sleeps. When all are here they spin, so that all leave at once.
 */
void spin_synchronize(spin_t* spin);

/* For programs that are not C: a barrier on the file `path`, of SPIN_BYTES zeroed bytes. NULL when it cannot be had. */
spin_t* spin_open(const char* path, int rank, int ranks);

#endif
