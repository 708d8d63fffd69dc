/* What the C programs of the benchmark share: a program waits, asleep, for its trial on a socket, takes fresh buffers,
 * times one operation on each between barriers, checks the first and the last result, and sends the times.
 *
 * The environment says where: BENCH_SOCKET (a Unix socket), BENCH_BARRIER (a file of SPIN_BYTES zeroed bytes or more).
 * A trial is one line: "DTYPE MODE SLOTS ITERATIONS TENSORS LENGTH...", lengths in elements. The answer is "ok
 * CHECKED\n" (CHECKED: compared elements) and ITERATIONS doubles, seconds; or "unsupported WHY\n" or "wrong WHY\n". The
 * end of the stream ends the program.
 */
#ifndef TRIAL_H
#define TRIAL_H

#include "element.h"
#include "spin.h"

/* How a list of tensors is to be averaged: in one call, with a call each, or copied into one buffer and back. */
typedef enum list_mode { MODE_LIST, MODE_EACH, MODE_FLAT, MODES } list_mode_t;

/* A trial. `lengths` are those of the `tensors` in elements, `bytes` of all of them without gaps. */
typedef struct trial {
  element_t type;
  list_mode_t mode;
  size_t slots, iterations, tensors, bytes;
  size_t* lengths;
} trial_t;

/* A contender. The functions end the program when something fails. */
typedef struct contender {
  int rank, ranks;
  /* NULL, or why the trial cannot be done. */
  const char* (*refuse)(const trial_t* trial);
  /* Memory for a tensor, aligned to cache lines and with room up to the next; the reverse. All ranks call alike. */
  void* (*alloc)(size_t bytes);
  void (*release)(void* tensor);
  /* The timed operation, in place on the tensors of a slot. */
  void (*average)(const trial_t* trial, void** tensors);
  /* 1 when the tensors keep their values, as a copy does, instead of taking the mean. */
  int keeps;
} contender_t;

/* Does trials until there are no more. */
void trials_serve(const contender_t* contender);

/* malloc and free of whole cache lines: ordinary memory. */
void* ordinary_alloc(size_t bytes);
void ordinary_free(void* tensor);

/* Ends the program with a message. */
_Noreturn void fail(const char* what, const char* why);

#endif
