/* Shared by the C programs of the benchmark. A program sleeps on a socket until its trial, allocates fresh buffers,
times
 * one operation on each between barriers, checks the first and the last result, and sends the times.
 *
 * Environment: BENCH_SOCKET (a Unix socket), BENCH_BARRIER (a file of at least SPIN_BYTES zeroed bytes).
 * A trial is one line: "DTYPE MODE SLOTS ITERATIONS TENSORS LENGTH...", lengths in elements. The answer is "ok CHECKED
"
 * (CHECKED: number of compared elements) and ITERATIONS doubles in seconds; or "unsupported WHY
" or "wrong WHY
". The
 * program exits at the end of the stream.
 */
#ifndef TRIAL_H
#define TRIAL_H

#include "element.h"
#include "spin.h"

/* How to average a list of tensors: one call, one call a tensor, or copied into one flat buffer and back. */
typedef enum list_mode { MODE_LIST, MODE_EACH, MODE_FLAT, MODES } list_mode_t;

/* A trial. `lengths`: elements of each of the `tensors`; `bytes`: total without gaps. */
typedef struct trial {
  element_t type;
  list_mode_t mode;
  size_t slots, iterations, tensors, bytes;
  size_t* lengths;
} trial_t;

/* A contender. Its functions exit the program on failure. */
typedef struct contender {
  int rank, ranks;
  /* NULL, or the reason why the trial is unsupported. */
  const char* (*refuse)(const trial_t* trial);
  /* Allocates and frees a tensor, aligned and padded to cache lines. All ranks make the same calls. */
  void* (*alloc)(size_t bytes);
  void (*release)(void* tensor);
  /* The timed operation, in place on the tensors of a slot. */
  void (*average)(const trial_t* trial, void** tensors);
  /* 1 if the operation leaves the tensors unchanged, as a copy does. */
  int keeps;
} contender_t;

/* Runs trials until the stream ends. */
void trials_serve(const contender_t* contender);

/* Allocates and frees whole cache lines of ordinary memory. */
void* ordinary_alloc(size_t bytes);
void ordinary_free(void* tensor);

/* Exits the program with a message. */
_Noreturn void fail(const char* what, const char* why);

#endif
