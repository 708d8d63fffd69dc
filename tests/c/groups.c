/* Groups of some ranks on any number of ranks: made by their members only, at work at once, freed without a trace.
 * Exits with 1 at the first difference, which it prints. */
#include <dirent.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "expect.h"

static int size = -1;

static dl_comm_group_t* make(const int* ranks, int count, const char* name) {
  dl_comm_group_t* group = NULL;
  EXPECT(dl_comm_group_create(ranks, count, name, &group) == 0 && group != NULL);
  return group;
}

static dl_comm_call_t sum_of(dl_comm_buffer_t* buffer, int32_t* values, size_t length) {
  dl_comm_call_t call;
  memset(&call, 0, sizeof call);
  memset(buffer, 0, sizeof *buffer);
  buffer->src = buffer->dst = values;
  buffer->length = length;
  buffer->dtype = DL_COMM_INT32;
  call.size = sizeof call;
  call.collective = DL_COMM_ALLREDUCE;
  call.reduce = DL_COMM_SUM;
  call.buffers = buffer;
  call.count = 1;
  return call;
}

/* Sums `length` values of each member; `total` is the sum of the members' ranks in the job. */
static void use(const dl_comm_group_t* group, size_t length, int members, int total) {
  int32_t* values = (int32_t*)malloc(length * sizeof *values);
  dl_comm_buffer_t buffer;
  dl_comm_call_t call = sum_of(&buffer, values, length);
  for (size_t i = 0; i < length; ++i) values[i] = rank + (int32_t)(i % 100);
  EXPECT(dl_comm_run(group, &call) == 0);
  for (size_t i = 0; i < length; ++i) EXPECT(values[i] == total + members * (int32_t)(i % 100));
  free(values);
}

static dl_comm_message_t message_of(dl_comm_buffer_t* buffer, int32_t* values, size_t length, int peer) {
  dl_comm_message_t message;
  sum_of(buffer, values, length);
  memset(&message, 0, sizeof message);
  message.size = sizeof message;
  message.buffers = buffer;
  message.count = 1;
  message.peer = peer;
  message.tag = 5;
  return message;
}

/* Each member sends `length` values to the next one. */
static void pass_around(const dl_comm_group_t* group, size_t length) {
  int me = -1, count = 0;
  EXPECT(dl_comm_group_rank(group, &me) == 0 && dl_comm_group_size(group, &count) == 0);
  int32_t* values = (int32_t*)malloc(2 * length * sizeof *values);
  dl_comm_buffer_t from, into;
  dl_comm_message_t send = message_of(&from, values, length, (me + 1) % count);
  dl_comm_message_t receive = message_of(&into, values + length, length, (me + count - 1) % count);
  for (size_t i = 0; i < length; ++i) values[i] = me + (int32_t)(i % 100);
  EXPECT(dl_comm_sendrecv(group, &send, &receive, NULL) == 0);
  for (size_t i = 0; i < length; ++i) EXPECT(values[length + i] == receive.peer + (int32_t)(i % 100));
  free(values);
}

static void pairs(void) {
  for (int first = 0; first < size; ++first) {
    for (int second = first + 1; second < size; ++second) {
      /* The second is rank 0 of the group. */
      int members[2], number = -1, count = -1;
      members[0] = second;
      members[1] = first;
      if (rank != first && rank != second) continue;
      dl_comm_group_t* group = make(members, 2, "pair");
      EXPECT(dl_comm_group_rank(group, &number) == 0 && number == (rank == first));
      EXPECT(dl_comm_group_size(group, &count) == 0 && count == 2);
      for (int repeat = 0; repeat < 3; ++repeat) use(group, 7, 2, first + second);
      use(group, 300000, 2, first + second);
      for (int repeat = 0; repeat < 50; ++repeat) pass_around(group, 1000);
      pass_around(group, 200000);
      EXPECT(dl_comm_group_free(group) == 0);
    }
  }
}

static void alone_and_all(void) {
  dl_comm_group_t* alone = make(&rank, 1, "alone");
  dl_comm_group_t* all = make(NULL, 0, NULL);
  use(alone, 1000, 1, rank);
  use(all, 1000, size, size * (size - 1) / 2);
  EXPECT(dl_comm_group_free(all) == 0 && dl_comm_group_free(alone) == 0);
}

/* A group that one rank aborts fails on all members; others are not affected. */
static void aborted(void) {
  dl_comm_group_t* group = make(NULL, 0, "aborted");
  use(group, 1000, size, size * (size - 1) / 2);
  if (rank == size - 1) EXPECT(dl_comm_group_abort(group, "no more") == 0);
  dl_comm_call_t call = {0};
  call.size = sizeof call;
  call.collective = DL_COMM_BARRIER;
  EXPECT(dl_comm_run(group, &call) == DL_COMM_ERROR_PEER_LOST && strstr(dl_comm_last_error(), "no more") != NULL);
  EXPECT(dl_comm_group_abort(NULL, NULL) == DL_COMM_ERROR_INVALID);
  EXPECT(dl_comm_group_free(group) == 0 && dl_comm_barrier() == 0);
}

static void* one_of_two(void* name) {
  dl_comm_group_t* group = make(NULL, 0, (const char*)name);
  for (int repeat = 0; repeat < 20; ++repeat) use(group, 5000, size, size * (size - 1) / 2);
  EXPECT(dl_comm_group_free(group) == 0);
  return NULL;
}

/* Two threads make and use a group each, started in another order on odd ranks. */
static void threads(void) {
  char names[2][2] = {"a", "b"};
  pthread_t started[2];
  for (int i = 0; i < 2; ++i) EXPECT(pthread_create(&started[i], NULL, one_of_two, names[(i + rank) % 2]) == 0);
  for (int i = 0; i < 2; ++i) EXPECT(pthread_join(started[i], NULL) == 0);
}

static void errors(void) {
  dl_comm_group_t* group = NULL;
  int others[2], outside[2];
  others[0] = others[1] = (rank + 1) % size;
  outside[0] = rank;
  outside[1] = size;
  if (size > 1)
    REFUSED(dl_comm_group_create(others, 1, "x", &group), DL_COMM_ERROR_INVALID, "only members make a group");
  REFUSED(dl_comm_group_create(others, 2, "x", &group), DL_COMM_ERROR_INVALID, "listed twice");
  REFUSED(dl_comm_group_create(outside, 2, "x", &group), DL_COMM_ERROR_INVALID, "there is no rank");
  outside[1] = -1;
  REFUSED(dl_comm_group_create(outside, 2, "x", &group), DL_COMM_ERROR_INVALID, "negative");
  REFUSED(dl_comm_group_create(&rank, -1, "x", &group), DL_COMM_ERROR_INVALID, "nranks");
  REFUSED(dl_comm_group_create(NULL, 1, "x", &group), DL_COMM_ERROR_INVALID, "ranks is NULL");
  REFUSED(dl_comm_group_create(&rank, 1, "x", NULL), DL_COMM_ERROR_INVALID, "group is NULL");
  EXPECT(group == NULL);
}

/* Settings of a group; a wrong one on one rank is an error on all. */
static void options(void) {
  dl_comm_group_t* group = NULL;
  dl_comm_group_options_t options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.threads = 3;
  options.timeout = 50;
  options.algorithm = "pairwise";
  options.gpu_path = "staged";
  EXPECT(dl_comm_group_create_with(NULL, 0, "set", &options, &group) == 0);
  use(group, 300000, size, size * (size - 1) / 2);
  EXPECT(dl_comm_group_free(group) == 0);
  if (rank == size - 1) options.algorithm = "fastest";
  REFUSED(dl_comm_group_create_with(NULL, 0, "set", &options, &group), DL_COMM_ERROR_INVALID, "fastest");
  options.algorithm = NULL;
  options.threads = -1;
  REFUSED(dl_comm_group_create_with(NULL, 0, "set", &options, &group), DL_COMM_ERROR_INVALID, "threads");
  options.threads = rank == 0 ? 2 : 1;
  if (size > 1) REFUSED(dl_comm_group_create_with(NULL, 0, "set", &options, &group), DL_COMM_ERROR_MISMATCH, "threads");
  options.size = 0;
  REFUSED(dl_comm_group_create_with(NULL, 0, "set", &options, &group), DL_COMM_ERROR_INVALID, "size is 0");
  EXPECT(group == NULL);
}

/* Rank r has r steps; those that have fewer contribute zeros. */
static void join(void) {
  dl_comm_group_t* group = make(NULL, 0, "uneven");
  for (int epoch = 0; epoch < 2; ++epoch) {
    int last = -1;
    for (int step = 0; step < rank; ++step) {
      int32_t value = rank + 1;
      dl_comm_buffer_t buffer;
      dl_comm_call_t call = sum_of(&buffer, &value, 1);
      EXPECT(dl_comm_run(group, &call) == 0);
      int32_t total = 0;
      for (int other = step + 1; other < size; ++other) total += other + 1;
      EXPECT(value == total);
    }
    EXPECT(dl_comm_join(group, 0, epoch == 0 ? &last : NULL) == 0);
    EXPECT(epoch == 1 || last == size - 1);
  }
  EXPECT(dl_comm_group_free(group) == 0);
  /* Without a call in between, the last in time. */
  int last = -1;
  usleep(50000 * (useconds_t)(size - 1 - rank));
  EXPECT(dl_comm_join(NULL, 0, &last) == 0 && last == 0);
}

static int entries(const char* folder) {
  int count = 0;
  DIR* opened = opendir(folder);
  EXPECT(opened != NULL);
  while (readdir(opened) != NULL) ++count;
  closedir(opened);
  return count;
}

static int lines_of(const char* path) {
  int count = 0, letter;
  FILE* file = fopen(path, "r");
  EXPECT(file != NULL);
  while ((letter = getc(file)) != EOF) count += letter == '\n';
  fclose(file);
  return count;
}

static void made_and_freed(int count) {
  for (int i = 0; i < count; ++i) {
    dl_comm_group_t* group = make(NULL, 0, "many");
    if (i % 3 == 0) use(group, 1000, size, size * (size - 1) / 2);
    EXPECT(dl_comm_group_free(group) == 0);
  }
}

static void a_thousand(void) {
  made_and_freed(50);
  EXPECT(dl_comm_barrier() == 0);
  int before[3], after[3];
  for (int pass = 0; pass < 2; ++pass) {
    int* found = pass == 0 ? before : after;
    if (pass == 1) made_and_freed(1000);
    found[0] = entries("/proc/self/task");
    found[1] = entries("/proc/self/fd");
    found[2] = lines_of("/proc/self/maps");
  }
  EXPECT(after[0] <= before[0]);
  EXPECT(after[1] <= before[1]);
  EXPECT(after[2] <= before[2] + 20); /* the C library's own memory */
  EXPECT(dl_comm_barrier() == 0);
}

/* A member has freed the group: the others get an error, and other groups work. */
static void a_member_leaves(void) {
  dl_comm_group_t* group = make(NULL, 0, "left");
  dl_comm_group_t* other = make(NULL, 0, "other");
  use(group, 10, size, size * (size - 1) / 2);
  if (rank == 0) EXPECT(dl_comm_group_free(group) == 0);
  if (rank != 0) {
    int32_t value = 1;
    dl_comm_buffer_t buffer;
    dl_comm_call_t call = sum_of(&buffer, &value, 1);
    EXPECT(dl_comm_run(group, &call) == DL_COMM_ERROR_PEER_LOST);
    EXPECT(strstr(dl_comm_last_error(), "group 'left'") != NULL || strstr(dl_comm_last_error(), "rank 0") != NULL);
    EXPECT(dl_comm_group_free(group) == 0);
  }
  use(other, 10, size, size * (size - 1) / 2);
  EXPECT(dl_comm_group_free(other) == 0);
}

static int run_once(const dl_comm_group_t* group) {
  int32_t value = 1;
  dl_comm_buffer_t buffer;
  dl_comm_call_t call = sum_of(&buffer, &value, 1);
  return dl_comm_run(group, &call);
}

/* The last of four ranks ends in the middle: its groups fail, and the others go on. */
static void a_lost_rank(void) {
  int pair[2];
  pair[0] = rank % 2;
  pair[1] = rank % 2 + 2;
  EXPECT(size == 4);
  dl_comm_group_t* two = make(pair, 2, "pair");
  dl_comm_group_t* all = make(NULL, 0, "all");
  use(two, 1000, 2, pair[0] + pair[1]);
  pass_around(all, 10);
  use(all, 1000, 4, 6);
  dl_comm_work_t* pending = NULL;
  int32_t value = 0;
  dl_comm_buffer_t buffer;
  dl_comm_message_t receive = message_of(&buffer, &value, 1, 3);
  if (rank == 3) {
    usleep(200000); /* the others have ended the calls before */
    _exit(7);
  }
  if (dl_comm_receive(all, &receive, &pending) == 0) {
    EXPECT(dl_comm_wait(pending, 0) == DL_COMM_ERROR_PEER_LOST && dl_comm_work_free(pending) == 0);
  }
  EXPECT(strstr(dl_comm_last_error(), "rank 3") != NULL);
  EXPECT(run_once(all) == DL_COMM_ERROR_PEER_LOST);
  EXPECT(strstr(dl_comm_last_error(), "rank 3") != NULL);
  if (rank == 1) {
    EXPECT(run_once(two) == DL_COMM_ERROR_PEER_LOST);
  } else {
    for (int repeat = 0; repeat < 100; ++repeat) use(two, 1000, 2, 2);
    pass_around(two, 10);
    pass_around(two, 1000000);
    dl_comm_group_t* later = make(pair, 2, "pair");
    use(later, 100000, 2, 2);
    EXPECT(dl_comm_group_free(later) == 0);
  }
  dl_comm_group_t* with_lost = NULL;
  REFUSED(dl_comm_group_create(NULL, 0, "late", &with_lost), DL_COMM_ERROR_PEER_LOST, "rank 3");
  EXPECT(dl_comm_group_free(two) == 0 && dl_comm_group_free(all) == 0);
  int rest[3] = {2, 0, 1};
  dl_comm_group_t* others = make(rest, 3, "rest");
  pass_around(others, 100000);
  use(others, 50000, 3, 3);
  EXPECT(dl_comm_group_free(others) == 0);
  usleep(200000); /* as above */
  printf("rank %d goes on\n", rank);
  fflush(stdout);
}

int main(int argc, char** argv) {
  EXPECT(dl_comm_init() == 0);
  rank = dl_comm_get_rank();
  size = dl_comm_get_nranks();
  if (argc > 1 && strcmp(argv[1], "lost") == 0) {
    a_lost_rank();
    dl_comm_finalize(); /* reports the lost rank */
    return 0;
  }
  errors();
  options();
  join();
  pairs();
  alone_and_all();
  threads();
  a_thousand();
  a_member_leaves();
  aborted(); /* the last: memory that is freed after a failure is not used again */
  dl_comm_group_t* late = make(&rank, 1, "late");
  EXPECT(dl_comm_finalize() == 0);
  int32_t value = 1;
  dl_comm_buffer_t buffer;
  dl_comm_call_t call = sum_of(&buffer, &value, 1);
  EXPECT(dl_comm_run(late, &call) == DL_COMM_ERROR_STATE);
  EXPECT(dl_comm_group_free(late) == 0);
  return 0;
}
