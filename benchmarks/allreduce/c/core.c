/* dl_comm's C interface. `core MEMORY`: "ordinary" is malloc's; other kinds are further rows of `kinds`. */
#include <dl_comm.h>
#include <stdlib.h>

#include "turns.h"

/* Where tensors lie: memory that dl_comm knows nothing of, or that it has handed out. */
typedef struct kind {
  const char* name;
  void* (*take)(size_t bytes);
  void (*give)(void* tensor);
} kind_t;

static void* shared_take(size_t bytes);
static void shared_give(void* tensor);

static const kind_t kinds[] = {
    {"ordinary", ordinary_take, ordinary_give},
    {"shared", shared_take, shared_give},
};

static dl_comm_buffer_t* buffers;
static size_t capacity;

static void check(int result, const char* what) {
  if (result < 0) fail(what, dl_comm_last_error());
}

static void* shared_take(size_t bytes) {
  void* memory;
  check(dl_comm_alloc(bytes, &memory), "dl_comm_alloc");
  return memory;
}

static void shared_give(void* tensor) { check(dl_comm_free(tensor), "dl_comm_free"); }

static void average(const turn_t* turn, void** tensors) {
  static const dlDataType_t types[ELEMENTS] = {
      [F32] = DL_COMM_FLOAT32, [F64] = DL_COMM_FLOAT64, [F16] = DL_COMM_FLOAT16, [BF16] = DL_COMM_BFLOAT16};
  if (turn->tensors > capacity) {
    capacity = turn->tensors;
    if (!(buffers = realloc(buffers, capacity * sizeof *buffers))) fail("core", "no memory");
  }
  for (size_t t = 0; t < turn->tensors; ++t)
    buffers[t] = (dl_comm_buffer_t){
        .src = tensors[t], .dst = tensors[t], .length = turn->lengths[t], .dtype = types[turn->type]};
  check(dl_comm_average(buffers, turn->tensors, 0, NULL), "dl_comm_average");
}

int main(int argc, char** argv) {
  const kind_t* kind = NULL;
  for (size_t i = 0; argc == 2 && i < sizeof kinds / sizeof *kinds; ++i)
    if (!strcmp(argv[1], kinds[i].name)) kind = &kinds[i];
  if (!kind) fail("usage", "core MEMORY");
  check(dl_comm_init(), "dl_comm_init");
  check(dl_comm_ensure_team(0, 0), "dl_comm_ensure_team");
  turns_serve(&(contender_t){.rank = dl_comm_get_rank(),
                             .ranks = dl_comm_get_nranks(),
                             .take = kind->take,
                             .give = kind->give,
                             .average = average});
  free(buffers);
  check(dl_comm_finalize(), "dl_comm_finalize");
  return 0;
}
