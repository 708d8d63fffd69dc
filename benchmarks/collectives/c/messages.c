/* Times messages between ranks 0 and 1 of one host: `messages SECONDS LARGEST_BYTES`. With -DUSE_MPI the MPI's own
 * functions, else dl_comm's. Rank 0 prints a line per size: NAME BYTES MEDIAN_US. `ping-pong` is half of a round trip
 * from private memory, `exchange` a message in each direction at once, `exchange-started` the same with handles,
 * `ping-pong-shared` is from memory of dl_comm_alloc. Every message is checked once. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef USE_MPI
#include <dl_comm.h>
static dl_comm_group_t* group;
#endif

enum { SIZES = 7, MOST = 2000 };
typedef enum { PING_PONG, EXCHANGE, STARTED, SHARED, NAMES } name_t;
static const char* const names[NAMES] = {"ping-pong", "exchange", "exchange-started", "ping-pong-shared"};
static const size_t sizes[SIZES] = {8, 1 << 10, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 64 << 20};
static int rank;

static void fail(const char* what, const char* why) {
  fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static void run(name_t name, char* src, char* dst, size_t bytes) {
  int peer = 1 - rank;
#ifdef USE_MPI
  int n = (int)bytes;
  MPI_Comm world = MPI_COMM_WORLD;
  MPI_Status* none = MPI_STATUS_IGNORE;
  if (name == EXCHANGE) {
    MPI_Sendrecv(src, n, MPI_CHAR, peer, 0, dst, n, MPI_CHAR, peer, 0, world, none);
  } else if (name == STARTED) {
    MPI_Request requests[2];
    MPI_Irecv(dst, n, MPI_CHAR, peer, 0, world, &requests[0]);
    MPI_Isend(src, n, MPI_CHAR, peer, 0, world, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  } else if (rank == 0) {
    MPI_Send(src, n, MPI_CHAR, peer, 0, world), MPI_Recv(dst, n, MPI_CHAR, peer, 0, world, none);
  } else {
    MPI_Recv(dst, n, MPI_CHAR, peer, 0, world, none), MPI_Send(src, n, MPI_CHAR, peer, 0, world);
  }
#else
  dl_comm_buffer_t buffer = {src, dst, bytes, DL_COMM_INT8, 0, NULL};
  dl_comm_message_t message;
  memset(&message, 0, sizeof message);
  message.size = sizeof message;
  message.buffers = &buffer;
  message.count = 1;
  message.peer = peer;
  int code;
  if (name == EXCHANGE) {
    code = dl_comm_sendrecv(group, &message, &message, NULL);
  } else if (name == STARTED) {
    dl_comm_work_t *received = NULL, *sent = NULL;
    code = dl_comm_receive(group, &message, &received);
    if (code == 0) code = dl_comm_send(group, &message, &sent);
    if (code == 0) code = dl_comm_wait(received, 0);
    if (code == 0) code = dl_comm_wait(sent, 0);
    dl_comm_work_free(received);
    dl_comm_work_free(sent);
  } else if (rank == 0) {
    code = dl_comm_sendrecv(group, &message, NULL, NULL);
    if (code == 0) code = dl_comm_sendrecv(group, NULL, &message, NULL);
  } else {
    code = dl_comm_sendrecv(group, NULL, &message, NULL);
    if (code == 0) code = dl_comm_sendrecv(group, &message, NULL, NULL);
  }
  if (code != 0) fail(names[name], dl_comm_last_error());
#endif
}

static int by_value(const void* left, const void* right) {
  double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

static void measure(name_t name, size_t bytes, double seconds) {
  char *src = NULL, *dst = NULL;
#ifdef USE_MPI
  if (name == SHARED) return;
#else
  if (name == SHARED && (dl_comm_alloc(bytes, (void**)&src) != 0 || dl_comm_alloc(bytes, (void**)&dst) != 0))
    fail("dl_comm_alloc", dl_comm_last_error());
#endif
  if (name != SHARED) src = aligned_alloc(4096, bytes + 4096 - bytes % 4096);
  if (name != SHARED) dst = aligned_alloc(4096, bytes + 4096 - bytes % 4096);
  if (!src || !dst) fail(names[name], "no memory");
  for (size_t i = 0; i < bytes; ++i) src[i] = (char)(i * 7 + (size_t)rank), dst[i] = 0;
  static double times[MOST];
  int count = 0, most = MOST;
  /* Short messages are timed in batches: the clock takes as long as one of them. */
  int batch = bytes <= 4096 ? 100 : 1;
  for (int i = -3; i < most; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime();
    for (int repeat = 0; repeat < batch; ++repeat) run(name, src, dst, bytes);
    double took = (MPI_Wtime() - begin) / batch / (name == EXCHANGE || name == STARTED ? 1 : 2), slowest;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    for (size_t j = 0; i == -3 && j < bytes; ++j) {
      if (dst[j] != (char)(j * 7 + 1 - (size_t)rank)) fail(names[name], "wrong data");
    }
    if (i == -1) {
      double fit = seconds / (slowest * batch + 1e-9);
      most = fit < 5 ? 5 : fit > MOST ? MOST : (int)fit;
    }
    if (i >= 0) times[count++] = slowest;
  }
  qsort(times, (size_t)count, sizeof *times, by_value);
  if (rank == 0) printf("%s %zu %.4f\n", names[name], bytes, 1e6 * times[count / 2]), fflush(stdout);
#ifndef USE_MPI
  if (name == SHARED && (dl_comm_free(src) != 0 || dl_comm_free(dst) != 0)) fail("dl_comm_free", dl_comm_last_error());
  if (name == SHARED) return;
#endif
  free(src);
  free(dst);
}

int main(int argc, char** argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 0.1;
  size_t largest = argc > 2 ? strtoull(argv[2], NULL, 10) : sizes[SIZES - 1];
  MPI_Init(&argc, &argv);
#ifndef USE_MPI
  if (dl_comm_init_teams(1, 0) != 0 || dl_comm_team_group(0, &group) != 0) fail("init", dl_comm_last_error());
#endif
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int name = 0; name < NAMES; ++name) {
    for (int size = 0; size < SIZES && sizes[size] <= largest; ++size) measure((name_t)name, sizes[size], seconds);
  }
#ifndef USE_MPI
  if (dl_comm_group_free(group) != 0 || dl_comm_finalize() != 0) fail("finalize", dl_comm_last_error());
#endif
  MPI_Finalize();
  return 0;
}
