/* dl_comm's C interface. `core MEMORY`: "ordinary" (malloc) or another row of `kinds`. */
#include <dl_comm.h>
#include <stdlib.h>

#include "trial.h"

/* The memory of tensors: ordinary memory, or memory from dl_comm_alloc. */
typedef struct kind {
  const char* name;
  void* (*alloc)(size_t bytes);
  void (*release)(void* tensor);
} kind_t;

static void* shared_alloc(size_t bytes);
static void shared_free(void* tensor);

static const kind_t kinds[] = {
    {"ordinary", ordinary_alloc, ordinary_free},
    {"shared", shared_alloc, shared_free},
};

static dl_comm_buffer_t* buffers;
static size_t capacity;

static void check(int result, const char* what) {
  if (result < 0) fail(what, dl_comm_last_error());
}

static void* shared_alloc(size_t bytes) {
  void* memory;
  check(dl_comm_alloc(bytes, &memory), "dl_comm_alloc");
  return memory;
}

static void shared_free(void* tensor) { check(dl_comm_free(tensor), "dl_comm_free"); }

static void average(const trial_t* trial, void** tensors) {
  static const dlDataType_t types[ELEMENTS] = {
      [F32] = DL_COMM_FLOAT32, [F64] = DL_COMM_FLOAT64, [F16] = DL_COMM_FLOAT16, [BF16] = DL_COMM_BFLOAT16};
  if (trial->tensors > capacity) {
    capacity = trial->tensors;
    if (!(buffers = realloc(buffers, capacity * sizeof *buffers))) fail("core", "no memory");
  }
  for (size_t t = 0; t < trial->tensors; ++t)
    buffers[t] = (dl_comm_buffer_t){
        .src = tensors[t], .dst = tensors[t], .length = trial->lengths[t], .dtype = types[trial->type]};
  check(dl_comm_average(buffers, trial->tensors, 0, NULL), "dl_comm_average");
}

int main(int argc, char** argv) {
  const kind_t* kind = NULL;
  for (size_t i = 0; argc == 2 && i < sizeof kinds / sizeof *kinds; ++i)
    if (!strcmp(argv[1], kinds[i].name)) kind = &kinds[i];
  if (!kind) fail("usage", "core MEMORY");
  check(dl_comm_init(), "dl_comm_init");
  check(dl_comm_ensure_team(0, 0), "dl_comm_ensure_team");
  trials_serve(&(contender_t){.rank = dl_comm_get_rank(),
                              .ranks = dl_comm_get_nranks(),
                              .alloc = kind->alloc,
                              .release = kind->release,
                              .average = average});
  free(buffers);
  check(dl_comm_finalize(), "dl_comm_finalize");
  return 0;
}
