/* MPI_Allreduce in place and a division, as in a program that uses only MPI. MPI has no standard 16-bit floats: uses
 * the library's extension types if available, else a user-defined operation.
 */
#include <mpi.h>
#include <stdlib.h>

#include "trial.h"

static MPI_Datatype types[ELEMENTS];
static MPI_Op sums[ELEMENTS];
static int ranks;
static char* scratch;
static size_t scratch_bytes;

static void check(int result, const char* what) {
  if (result != MPI_SUCCESS) fail(what, "failed");
}

static void add_f16(void* in, void* inout, int* count, MPI_Datatype* type) {
  (void)type;
  const uint16_t* restrict from = in;
  uint16_t* restrict to = inout;
  for (int i = 0; i < *count; ++i) to[i] = f16_of_float(float_of_f16(from[i]) + float_of_f16(to[i]));
}

static void add_bf16(void* in, void* inout, int* count, MPI_Datatype* type) {
  (void)type;
  const uint16_t* restrict from = in;
  uint16_t* restrict to = inout;
  for (int i = 0; i < *count; ++i) to[i] = bf16_of_float(float_of_bf16(from[i]) + float_of_bf16(to[i]));
}

static void set_up(void) {
  types[F32] = MPI_FLOAT;
  types[F64] = MPI_DOUBLE;
  sums[F32] = sums[F64] = sums[F16] = sums[BF16] = MPI_SUM;
#ifdef MPIX_C_FLOAT16
  types[F16] = MPIX_C_FLOAT16;
#else
  types[F16] = MPI_UINT16_T;
  check(MPI_Op_create(add_f16, 1, &sums[F16]), "MPI_Op_create");
#endif
#ifdef MPIX_BFLOAT16
  types[BF16] = MPIX_BFLOAT16;
#else
  types[BF16] = MPI_UINT16_T;
  check(MPI_Op_create(add_bf16, 1, &sums[BF16]), "MPI_Op_create");
#endif
  (void)add_f16;
  (void)add_bf16;
}

static void divide(element_t type, void* data, size_t length) {
  const float share = 1.0f / (float)ranks;
  float* f32 = data;
  double* f64 = data;
  uint16_t* half = data;
  switch (type) {
    case F32:
      for (size_t i = 0; i < length; ++i) f32[i] *= share;
      break;
    case F64:
      for (size_t i = 0; i < length; ++i) f64[i] *= 1.0 / ranks;
      break;
    case F16:
      for (size_t i = 0; i < length; ++i) half[i] = f16_of_float(float_of_f16(half[i]) * share);
      break;
    default:
      for (size_t i = 0; i < length; ++i) half[i] = bf16_of_float(float_of_bf16(half[i]) * share);
  }
}

static void average_one(element_t type, void* data, size_t length) {
  check(MPI_Allreduce(MPI_IN_PLACE, data, (int)length, types[type], sums[type], MPI_COMM_WORLD), "MPI_Allreduce");
  divide(type, data, length);
}

static void average(const trial_t* trial, void** tensors) {
  const size_t size = element_sizes[trial->type];
  if (trial->mode != MODE_FLAT) {
    for (size_t t = 0; t < trial->tensors; ++t) average_one(trial->type, tensors[t], trial->lengths[t]);
    return;
  }
  if (scratch_bytes < trial->bytes) {
    scratch_bytes = trial->bytes;
    if (!(scratch = realloc(scratch, scratch_bytes))) fail("mpi", "no memory");
  }
  char* at = scratch;
  for (size_t t = 0; t < trial->tensors; at += trial->lengths[t++] * size)
    memcpy(at, tensors[t], trial->lengths[t] * size);
  average_one(trial->type, scratch, trial->bytes / size);
  at = scratch;
  for (size_t t = 0; t < trial->tensors; at += trial->lengths[t++] * size)
    memcpy(tensors[t], at, trial->lengths[t] * size);
}

/* Also frees the flat buffer, so that waiting contenders hold little memory. */
static void release(void* tensor) {
  free(scratch);
  scratch = NULL;
  scratch_bytes = 0;
  ordinary_free(tensor);
}

static const char* refuse(const trial_t* trial) {
  return trial->bytes / element_sizes[trial->type] > 0x7fffffff ? "more elements than an int counts" : NULL;
}

int main(int argc, char** argv) {
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  set_up();
  trials_serve(&(contender_t){
      .rank = rank, .ranks = ranks, .refuse = refuse, .alloc = ordinary_alloc, .release = release, .average = average});
  MPI_Finalize();
  return 0;
}
