/* The four calls in C: every process brings two tensors, and gets their means over all processes, in place.
 * Two replicas ("towers") of a model in each process are averaged in the same call.
 *
 * Build and run:
 *
 *     cmake -B build -Ddl_comm_DIR=$(python -c 'import dl_comm; print(dl_comm.get_cmake_dir())')
 *     cmake --build build
 *     mpiexec -n 2 build/average
 */
#include <dl_comm.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOWERS = 2, TENSORS = 2, WEIGHTS = 1000, BIASES = 10 };

/* Ends the program when a call failed. */
static void check(int result, const char* what) {
  if (result < 0) {
    fprintf(stderr, "%s: error %d: %s\n", what, result, dl_comm_last_error());
    exit(1);
  }
}

int main(void) {
  check(dl_comm_init(), "dl_comm_init");
  check(dl_create_team(0, 2, 0), "dl_create_team");
  const int rank = dl_comm_get_rank(), nranks = dl_comm_get_nranks();

  static float weights[TOWERS][WEIGHTS];
  static double biases[TOWERS][BIASES];
  void* tensors[TOWERS][TENSORS];
  void** all_tensors[TOWERS];
  int lengths[TENSORS] = {WEIGHTS, BIASES};
  dlDataType_t dtypes[TENSORS] = {DL_COMM_FLOAT32, DL_COMM_FLOAT64};
  int* all_lengths[TOWERS];
  dlDataType_t* all_dtypes[TOWERS];
  int ntensors[TOWERS];
  for (int tower = 0; tower < TOWERS; ++tower) {
    for (int i = 0; i < WEIGHTS; ++i) weights[tower][i] = (float)(TOWERS * rank + tower);
    for (int i = 0; i < BIASES; ++i) biases[tower][i] = i;
    tensors[tower][0] = weights[tower];
    tensors[tower][1] = biases[tower];
    all_tensors[tower] = tensors[tower];
    all_lengths[tower] = lengths;
    all_dtypes[tower] = dtypes;
    ntensors[tower] = TENSORS;
  }

  /* Before training: everybody starts from the tensors of process 0. Then the weights differ again. */
  check(dl_comm_broadcast(all_tensors, all_lengths, all_dtypes, ntensors, 1, 0), "dl_comm_broadcast");
  for (int i = 0; i < WEIGHTS; ++i) weights[0][i] = (float)(TOWERS * rank);

  /* In each step: the mean over processes and towers. */
  check(dl_comm_gradients(all_tensors, all_lengths, all_dtypes, ntensors, TOWERS, 0), "dl_comm_gradients");

  const float expected = (float)(TOWERS * nranks - 1) / 2;
  for (int tower = 0; tower < TOWERS; ++tower) {
    if (weights[tower][WEIGHTS - 1] != expected || biases[tower][BIASES - 1] != BIASES - 1) {
      fprintf(stderr, "rank %d: expected %g, got %g\n", rank, expected, weights[tower][WEIGHTS - 1]);
      return 1;
    }
  }
  if (rank == 0) printf("mean over %d processes and %d towers: %g\n", nranks, TOWERS, expected);
  check(dl_comm_finalize(), "dl_comm_finalize");
  return 0;
}
