/* For comparison: every process copies its buffer to a second buffer, all at the same time. `copy RANKS` forks all
 * ranks.
 */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "trial.h"

/* The copy follows the tensor in memory. */
static size_t copy_offset(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void* alloc(size_t bytes) {
  void* tensor = ordinary_alloc(2 * copy_offset(bytes));
  if (tensor) memset(tensor, 0, 2 * copy_offset(bytes));
  return tensor;
}

static void copy(const trial_t* trial, void** tensors) {
  for (size_t t = 0; t < trial->tensors; ++t) {
    size_t bytes = trial->lengths[t] * element_sizes[trial->type];
    memcpy((char*)tensors[t] + copy_offset(bytes), tensors[t], bytes);
  }
}

int main(int argc, char** argv) {
  const int ranks = argc == 2 ? atoi(argv[1]) : 0;
  if (ranks < 1 || ranks > SPIN_MAX_RANKS) fail("usage", "copy RANKS");
  int rank = 0;
  for (; rank < ranks - 1; ++rank) {
    pid_t child = fork();
    if (child < 0) fail("copy", "cannot fork");
    if (child == 0) break;
  }
  trials_serve(&(contender_t){
      .rank = rank, .ranks = ranks, .alloc = alloc, .release = ordinary_free, .average = copy, .keeps = 1});
  if (rank == ranks - 1)
    while (wait(NULL) > 0) continue;
  return 0;
}
