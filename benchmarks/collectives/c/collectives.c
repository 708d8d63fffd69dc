/* Times collectives on float32 between the ranks of one host: `collectives SECONDS LARGEST_BYTES`. With -DUSE_MPI the
 * MPI's own functions, with -DLIMIT copies of memory, else dl_comm's functions. A buffer has a new place for each call,
 * from a ring of up to 64 buffers and 64 MiB. Rank 0 prints a line per collective and size: NAME BYTES MEDIAN_US, of
 * the slowest rank. BYTES is the longer of input and output. Every result is checked once. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if !defined USE_MPI && !defined LIMIT
#include <dl_comm.h>
static dl_comm_group_t* group;
#endif

enum { NAMES = 8, SIZES = 7, MOST = 2000, RING_BYTES = 64 << 20 };
typedef enum { ALLREDUCE, BROADCAST, ALLGATHER, REDUCE_SCATTER, ALLTOALL, GATHER, SCATTER, REDUCE } name_t;
static const char* const names[NAMES] = {"allreduce",  "broadcast", "all-gather", "reduce-scatter",
                                         "all-to-all", "gather",    "scatter",    "reduce"};
static const size_t sizes[SIZES] = {64, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20};
static int rank, ranks;

static void fail(const char* what, const char* why) {
  fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Whether a rank has a block for each rank in its input or output. */
static int splits_input(name_t name) { return name == REDUCE_SCATTER || name == ALLTOALL || name == SCATTER; }
static int splits_output(name_t name) { return name == ALLGATHER || name == ALLTOALL || name == GATHER; }

#ifdef LIMIT
/* The bytes that this rank copies if every byte is copied once, and all ranks take an equal part of the work for
 * results that more than one rank needs. A reduction of slices reads `ranks` inputs for each output. */
static size_t must_copy(name_t name, size_t length) {
  size_t block = length * sizeof(float), n = (size_t)ranks;
  switch (name) {
    case ALLREDUCE:
    case SCATTER:
      return block;
    case BROADCAST:
      return rank == 0 ? 0 : block;
    case ALLGATHER:
    case ALLTOALL:
      return n * block;
    case GATHER:
      return rank == 0 ? n * block : 0;
    case REDUCE_SCATTER:
      return (n + 1) * block / 2;
    case REDUCE:
      return (n + 1) * block / (2 * n);
  }
  return 0;
}
#endif

/* `length`: elements of a block. */
static void run(name_t name, float* src, float* dst, size_t length) {
#ifdef LIMIT
  memcpy(dst, src, must_copy(name, length));
#elif defined USE_MPI
  int n = (int)length, code = MPI_SUCCESS;
  MPI_Comm world = MPI_COMM_WORLD;
  switch (name) {
    case ALLREDUCE:
      code = MPI_Allreduce(src, dst, n, MPI_FLOAT, MPI_SUM, world);
      break;
    case BROADCAST:
      code = MPI_Bcast(rank == 0 ? src : dst, n, MPI_FLOAT, 0, world);
      break;
    case ALLGATHER:
      code = MPI_Allgather(src, n, MPI_FLOAT, dst, n, MPI_FLOAT, world);
      break;
    case REDUCE_SCATTER:
      code = MPI_Reduce_scatter_block(src, dst, n, MPI_FLOAT, MPI_SUM, world);
      break;
    case ALLTOALL:
      code = MPI_Alltoall(src, n, MPI_FLOAT, dst, n, MPI_FLOAT, world);
      break;
    case GATHER:
      code = MPI_Gather(src, n, MPI_FLOAT, dst, n, MPI_FLOAT, 0, world);
      break;
    case SCATTER:
      code = MPI_Scatter(src, n, MPI_FLOAT, dst, n, MPI_FLOAT, 0, world);
      break;
    case REDUCE:
      code = MPI_Reduce(src, dst, n, MPI_FLOAT, MPI_SUM, 0, world);
      break;
  }
  if (code != MPI_SUCCESS) fail(names[name], "failed");
#else
  static const dl_comm_collective_t codes[NAMES] = {DL_COMM_ALLREDUCE,      DL_COMM_BROADCAST, DL_COMM_ALLGATHER,
                                                    DL_COMM_REDUCE_SCATTER, DL_COMM_ALLTOALL,  DL_COMM_GATHER,
                                                    DL_COMM_SCATTER,        DL_COMM_REDUCE};
  /* As MPI_Bcast, which sends from the root's buffer. */
  if (name == BROADCAST && rank == 0) dst = src;
  dl_comm_buffer_t buffer = {src, dst, length, DL_COMM_FLOAT32, 0, NULL};
  dl_comm_call_t call;
  memset(&call, 0, sizeof call);
  call.size = sizeof call;
  call.collective = codes[name];
  call.reduce = DL_COMM_SUM;
  call.buffers = &buffer;
  call.count = 1;
  if (dl_comm_run(group, &call) != 0) fail(names[name], dl_comm_last_error());
#endif
}

/* Every element of rank r is r + 1. */
static void check(name_t name, const float* dst, size_t length) {
#ifdef LIMIT
  return;
#endif
  float total = (float)(ranks * (ranks + 1) / 2);
  int is_root = rank == 0;
  for (size_t block = 0; block < (splits_output(name) ? (size_t)ranks : 1); ++block) {
    float want = splits_output(name)                                             ? (float)(block + 1)
                 : name == ALLREDUCE || name == REDUCE_SCATTER || name == REDUCE ? total
                                                                                 : 1;
    if ((name == GATHER || name == REDUCE || name == BROADCAST) && is_root != (name != BROADCAST)) return;
    for (size_t i = 0; i < length; ++i) {
      if (dst[block * length + i] != want) fail(names[name], "wrong result");
    }
  }
}

static int by_value(const void* left, const void* right) {
  double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

static void measure(name_t name, size_t bytes, double seconds) {
  size_t length = bytes / sizeof(float), total = length;
  if (splits_input(name) || splits_output(name))
    length = (length + (size_t)ranks - 1) / (size_t)ranks, total = length * (size_t)ranks;
  size_t stride = (total + 15) / 16 * 16, slots = RING_BYTES / (stride * sizeof(float));
  if (slots > 64) slots = 64;
  if (slots < 2) slots = 2;
  float* src = aligned_alloc(64, slots * stride * sizeof(float));
  float* dst = aligned_alloc(64, slots * stride * sizeof(float));
  if (!src || !dst) fail(names[name], "no memory");
  for (size_t i = 0; i < slots * stride; ++i) src[i] = (float)(rank + 1), dst[i] = 0;
  static double times[MOST];
  int count = 0, most = MOST;
  /* Small calls are timed in batches: the clock takes as long as one of them. */
  int batch = bytes <= 4096 ? 100 : 1;
  for (int i = -3; i < most; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime();
    for (int repeat = 0; repeat < batch; ++repeat) {
      size_t slot = (size_t)(i + 3 + repeat) % slots;
      run(name, src + slot * stride, dst + slot * stride, length);
    }
    double took = (MPI_Wtime() - begin) / batch, slowest;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (i == -3) check(name, dst, length);
    if (i == -1) {
      double fit = seconds / (slowest * batch + 1e-9);
      most = fit < 5 ? 5 : fit > MOST ? MOST : (int)fit;
    }
    if (i >= 0) times[count++] = slowest;
  }
  qsort(times, (size_t)count, sizeof *times, by_value);
  if (rank == 0) printf("%s %zu %.4f\n", names[name], bytes, 1e6 * times[count / 2]), fflush(stdout);
  free(src);
  free(dst);
}

int main(int argc, char** argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 0.1;
  size_t largest = argc > 2 ? strtoull(argv[2], NULL, 10) : sizes[SIZES - 1];
#if defined USE_MPI || defined LIMIT
  MPI_Init(&argc, &argv);
#else
  /* Between hosts dl_comm calls MPI from threads of its own. */
  int level;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  if (dl_comm_init_teams(1, 0) != 0 || dl_comm_team_group(0, &group) != 0) fail("init", dl_comm_last_error());
#endif
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (int name = 0; name < NAMES; ++name) {
    for (int size = 0; size < SIZES && sizes[size] <= largest; ++size) measure((name_t)name, sizes[size], seconds);
  }
#if !defined USE_MPI && !defined LIMIT
  if (dl_comm_group_free(group) != 0 || dl_comm_finalize() != 0) fail("finalize", dl_comm_last_error());
#endif
  MPI_Finalize();
  return 0;
}
