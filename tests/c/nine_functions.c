/* The C API on any number of ranks: the nine functions of the plugin, towers, dtypes, errors. Exits with 1 at the first
 * difference, which it prints. */
#include "expect.h"

enum { LENGTH = 300000 };

static float* filled(int length, float value) {
  float* data = malloc(sizeof(float) * (size_t)length);
  for (int i = 0; i < length; ++i) data[i] = value;
  return data;
}

static void averages_and_broadcasts(int nranks) {
  float* data[2] = {filled(LENGTH, 2.0f * rank), filled(LENGTH, 2.0f * rank + 1)};
  long long counts[2] = {10 * rank, 10 * rank};
  void* tensors[2][2] = {{data[0], &counts[0]}, {data[1], &counts[1]}};
  void** all[2] = {tensors[0], tensors[1]};
  int lengths[2] = {LENGTH, 1}, *all_lengths[2] = {lengths, lengths};
  dlDataType_t dtypes[2] = {DL_COMM_FLOAT32, DL_COMM_INT64}, *all_dtypes[2] = {dtypes, dtypes};
  int ntensors[2] = {2, 2};
  for (int team = 0; team < 3; ++team) {
    for (int i = 0; i < LENGTH; ++i) data[0][i] = 2.0f * rank, data[1][i] = 2.0f * rank + 1;
    counts[0] = counts[1] = 10 * rank;
    EXPECT(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 2, team) == 0);
    for (int tower = 0; tower < 2; ++tower) {
      for (int i = 0; i < LENGTH; ++i) EXPECT(data[tower][i] == nranks - 0.5f);
      EXPECT(counts[tower] == 5 * (nranks - 1));
    }
  }
  for (int root = 0; root < nranks; ++root) {
    data[0][LENGTH - 1] = (float)rank;
    data[1][0] = -1.0f;
    EXPECT(dl_comm_broadcast(all, all_lengths, all_dtypes, ntensors, 2, root) == 0);
    EXPECT(data[0][LENGTH - 1] == root && data[1][LENGTH - 1] == root && data[1][0] == nranks - 0.5f);
  }

  REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 0, 0), DL_COMM_ERROR_INVALID, "ntowers");
  REFUSED(dl_comm_gradients(NULL, all_lengths, all_dtypes, ntensors, 1, 0), DL_COMM_ERROR_INVALID, "all_tensors");
  REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 1, 64), DL_COMM_ERROR_INVALID, "team 64");
  REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 1, -1), DL_COMM_ERROR_INVALID, "team -1");
  REFUSED(dl_comm_broadcast(all, all_lengths, all_dtypes, ntensors, 1, nranks), DL_COMM_ERROR_INVALID, "root");
  dtypes[1] = (dlDataType_t)77;
  REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 1, 0), DL_COMM_ERROR_DTYPE, "77");
  dtypes[1] = DL_COMM_BOOL;
  REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 1, 0), DL_COMM_ERROR_DTYPE, "bool");
  dtypes[1] = DL_COMM_INT64;
  lengths[0] = -1;
  REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 1, 0), DL_COMM_ERROR_INVALID, "negative");
  ntensors[0] = 0;
  REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 1, 0), DL_COMM_ERROR_INVALID, "empty");
  if (nranks > 1) {
    ntensors[0] = 1;
    lengths[0] = rank == 0 ? 7 : 8;
    REFUSED(dl_comm_gradients(all, all_lengths, all_dtypes, ntensors, 1, 0), DL_COMM_ERROR_MISMATCH, "float32[8]");
  }
  free(data[0]);
  free(data[1]);
}

static void shared_memory(int nranks) {
  void* memory = NULL;
  EXPECT(dl_comm_alloc(sizeof(float) * LENGTH, &memory) == 0);
  float* data = memory;
  EXPECT(data[0] == 0 && data[LENGTH - 1] == 0);
  for (int i = 0; i < LENGTH; ++i) data[i] = (float)rank;
  dl_comm_buffer_t buffer = {data, data, LENGTH, DL_COMM_FLOAT32, 0, NULL};
  EXPECT(dl_comm_average(&buffer, 1, 0, NULL) == 0);
  for (int i = 0; i < LENGTH; ++i) EXPECT(data[i] == 0.5f * (float)(nranks - 1));
  REFUSED(dl_comm_free(data + 1024), DL_COMM_ERROR_INVALID, "dl_comm_alloc");
  EXPECT(dl_comm_free(data) == 0);
  REFUSED(dl_comm_free(data), DL_COMM_ERROR_INVALID, "before");
  EXPECT(dl_comm_free(NULL) == 0);
  REFUSED(dl_comm_alloc(1, NULL), DL_COMM_ERROR_INVALID, "NULL");
  REFUSED(dl_comm_alloc((size_t)1 << 50, &memory), DL_COMM_ERROR_SYSTEM, "are free");
  EXPECT(memory == NULL);
}

static void result_memory(void) {
  const size_t bytes = (size_t)3 << 20;
  EXPECT(dl_comm_result_alloc(1000) == NULL);
  char* result = dl_comm_result_alloc(bytes);
  EXPECT(result != NULL && (uintptr_t)result % 4096 == 0);
  result[0] = result[bytes - 1] = 1;
  dl_comm_result_free(result);
  EXPECT(dl_comm_result_alloc(bytes) == result);
  dl_comm_result_free(result);
  dl_comm_result_free(NULL);
}

static void beyond_the_plugin(int nranks) {
  const int64_t shape[2] = {2, 3};
  double source[6], mean[6];
  for (int i = 0; i < 6; ++i) source[i] = i + rank, mean[i] = 0;
  dl_comm_buffer_t buffer = {source, mean, 6, DL_COMM_FLOAT64, 2, shape};
  EXPECT(dl_comm_average(&buffer, 1, 0, "metrics") == 0);
  for (int i = 0; i < 6; ++i) EXPECT(mean[i] == i + (nranks - 1) / 2.0 && source[i] == i + rank);
  buffer.src = mean;
  EXPECT(dl_comm_check_buffers_match(&buffer, 1, 1) == 0);
  buffer.src = source;
  EXPECT(dl_comm_check_buffers_match(&buffer, 1, 0) == (nranks > 1));
  buffer.dst = source;
  EXPECT(dl_comm_broadcast_buffers(&buffer, 1, 0, "weights", -1) == 0);
  EXPECT(source[0] == 0 && source[5] == 5);
  EXPECT(dl_comm_barrier() == 0 && dl_comm_barrier_timeout(60) == 0);
}

/* Deadlines, numbers, a dump and a timeline. */
static void diagnosis(void) {
  char text[8192], path[4096], few[8];
  EXPECT(dl_comm_set_timeout(-1, 100) == 0 && dl_comm_set_timeout(-1, 0) == 0);
  REFUSED(dl_comm_set_timeout(-1, -2), DL_COMM_ERROR_INVALID, "seconds");
  REFUSED(dl_comm_set_timeout(62, 1), DL_COMM_ERROR_INVALID, "team 62");
  const int length = dl_comm_stats(text, sizeof text);
  EXPECT(length > 0 && length == (int)strlen(text) && strstr(text, "\"calls\"") != NULL);
  EXPECT(dl_comm_stats(NULL, 0) >= length && dl_comm_stats(few, sizeof few) >= length && strlen(few) == 7);
  REFUSED(dl_comm_stats(NULL, 8), DL_COMM_ERROR_INVALID, "NULL");
  const char* folder = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp";
  EXPECT(dl_comm_timeline_start(folder) == 0);
  REFUSED(dl_comm_timeline_start(folder), DL_COMM_ERROR_STATE, "stop it first");
  EXPECT(dl_comm_barrier() == 0 && dl_comm_timeline_stop() == 0 && dl_comm_timeline_stop() == 0);
  snprintf(path, sizeof path, "%s/rank%d.trace.json", folder, rank);
  EXPECT(remove(path) == 0);
  REFUSED(dl_comm_timeline_start(""), DL_COMM_ERROR_INVALID, "folder");
  EXPECT(dl_comm_dump(folder, path, sizeof path) > 0 && strstr(path, folder) == path && remove(path) == 0);
  REFUSED(dl_comm_dump("/proc/nowhere/at/all", path, sizeof path), DL_COMM_ERROR_SYSTEM, "rank");
}

/* Two towers on a schedule: a blocking call, the first non-blocking one, then one behind, at last what is left. */
static void a_schedule(int nranks) {
  const double returned[7] = {1, 2, 0, 4, 8, 16, 32 + 64};
  double tower[2];
  void *first[1] = {&tower[0]}, *second[1] = {&tower[1]}, **all[2] = {first, second};
  int length = 1, *lengths[2] = {&length, &length}, ntensors[2] = {1, 1};
  dlDataType_t dtype = DL_COMM_FLOAT64, *dtypes[2] = {&dtype, &dtype};
  EXPECT(dl_comm_config_team(3, 0, 1, 7, 0, 1, DL_COMM_COOLDOWN_DEFAULT) == 0); /* makes the team */
  for (int call = 0; call < 7; ++call) {
    tower[0] = (double)(1 << call) + rank - (nranks - 1) / 2.0 + 0.25;
    tower[1] = tower[0] - 0.5;
    EXPECT(dl_comm_gradients(all, lengths, dtypes, ntensors, 2, 3) == 0);
    EXPECT(tower[0] == returned[call] && tower[1] == returned[call]);
  }
  dl_comm_buffer_t buffers[2] = {{&tower[0], &tower[0], 1, DL_COMM_FLOAT64, 0, NULL},
                                 {&tower[1], &tower[1], 1, DL_COMM_FLOAT64, 0, NULL}};
  tower[0] = rank, tower[1] = rank + 1;
  EXPECT(dl_comm_average_towers(buffers, 1, 2, 3, "towers", 60) == 0 && tower[0] == nranks / 2.0 &&
         tower[1] == tower[0]);
  EXPECT(dl_comm_get_waited(3) > 0);
  REFUSED(dl_comm_get_waited(63), DL_COMM_ERROR_INVALID, "team 63");
  REFUSED(dl_comm_average_towers(buffers, 1, 0, 3, NULL, -1), DL_COMM_ERROR_INVALID, "towers");
  REFUSED(dl_comm_config_team(3, 2, 1, 7, 0, 1, DL_COMM_COOLDOWN_LAST), DL_COMM_ERROR_INVALID, "trans_alg");
  REFUSED(dl_comm_config_team(64, 0, 1, 7, 0, 1, DL_COMM_COOLDOWN_LAST), DL_COMM_ERROR_INVALID, "team 64");
  REFUSED(dl_comm_config_team(3, 0, 1, 7, 0, 1, (dl_comm_cooldown_t)3), DL_COMM_ERROR_INVALID, "cooldown");
}

/* What it tells is cut like snprintf does it, and grows when MPI comes up. */
static int describes(const char* state) {
  const int length = dl_comm_describe(NULL, 0);
  EXPECT(length > 100);
  char *whole = malloc((size_t)length + 1), few[10];
  EXPECT(dl_comm_describe(whole, (size_t)length + 1) == length && (int)strlen(whole) == length);
  EXPECT(whole[0] == '{' && whole[length - 1] == '}' && strstr(whole, state) != NULL);
  EXPECT(dl_comm_describe(few, sizeof few) == length && strlen(few) == 9 && strncmp(few, whole, 9) == 0);
  REFUSED(dl_comm_describe(NULL, 10), DL_COMM_ERROR_INVALID, "NULL");
  free(whole);
  return length;
}

int main(void) {
  EXPECT(dl_comm_last_error()[0] == '\0');
  REFUSED(dl_comm_get_rank(), DL_COMM_ERROR_STATE, "init");
  REFUSED(dl_comm_barrier(), DL_COMM_ERROR_STATE, "init");
  EXPECT(dl_comm_finalize() == 0);
  const int fresh = describes("\"state\":\"not_started\"");
  EXPECT(dl_comm_init_mpi() == 0 && dl_comm_init_mpi() == 0);
  EXPECT(describes("\"state\":\"started\"") > fresh);
  rank = dl_comm_get_rank();
  const int nranks = dl_comm_get_nranks();
  EXPECT(rank >= 0 && rank < nranks);
  EXPECT(dl_comm_localrank() >= 0 && dl_comm_localrank() <= rank);
  EXPECT(dl_comm_is_initialized() == 0);
  REFUSED(dl_create_team(0, 1, 0), DL_COMM_ERROR_STATE, "init");
  REFUSED(dl_comm_config_team(0, 0, 1, 1, 0, 1, DL_COMM_COOLDOWN_DEFAULT), DL_COMM_ERROR_STATE, "init");

  EXPECT(dl_comm_init() == 0 && dl_comm_init() == 0 && dl_comm_is_initialized() == 1);
  EXPECT(dl_create_team(0, 3, 0) == 0);
  EXPECT(dl_comm_create_team(1, 1, 1) == 0);
  REFUSED(dl_create_team(1, 1, 0), DL_COMM_ERROR_INVALID, "exists");
  REFUSED(dl_create_team(-1, 1, 0), DL_COMM_ERROR_INVALID, "team -1");
  REFUSED(dl_create_team(2, 0, 0), DL_COMM_ERROR_INVALID, "threads");
  REFUSED(dl_create_team(2, 1, 2), DL_COMM_ERROR_INVALID, "prec_level");
  EXPECT(dl_comm_get_nteams() == 2);
  averages_and_broadcasts(nranks); /* makes team 2 by itself */
  EXPECT(dl_comm_get_nteams() == 3);
  shared_memory(nranks);
  result_memory();
  beyond_the_plugin(nranks);
  a_schedule(nranks);
  diagnosis();

  EXPECT(dl_comm_finalize() == 0 && dl_comm_finalize() == 0);
  describes("\"state\":\"finalized\"");
  EXPECT(dl_comm_get_rank() == rank);
  REFUSED(dl_comm_barrier(), DL_COMM_ERROR_STATE, "finalized");

  /* Another job. */
  EXPECT(dl_comm_init() == 0);
  EXPECT(dl_comm_get_rank() == rank && dl_comm_get_nranks() == nranks);
  averages_and_broadcasts(nranks);
  EXPECT(dl_comm_finalize() == 0);
  REFUSED(dl_comm_barrier(), DL_COMM_ERROR_STATE, "finalized");
  return 0;
}
