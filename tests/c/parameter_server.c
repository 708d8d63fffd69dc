/* A parameter server by the C API, on any number of ranks: rules, handles, changes of a shard, refusals. Exits with 1
 * at the first difference, which it prints. */
#include <unistd.h>

#include "expect.h"

#define LENGTH 40000

static int size = -1, ended = 0;

static dl_comm_update_t update_of(dl_comm_buffer_t* buffer, float* values, int rule) {
  dl_comm_update_t update;
  memset(&update, 0, sizeof update);
  memset(buffer, 0, sizeof *buffer);
  buffer->src = buffer->dst = values;
  buffer->length = LENGTH;
  buffer->dtype = DL_COMM_FLOAT32;
  update.size = sizeof update;
  update.count = 1;
  update.buffers = buffer;
  update.rule = rule;
  return update;
}

static void fill(float* values, float value) {
  for (int i = 0; i < LENGTH; ++i) values[i] = value;
}

static void expect_all(const dl_comm_parameter_server_t* server, float value, int line) {
  static float values[LENGTH];
  dl_comm_buffer_t buffer;
  dl_comm_update_t receive = update_of(&buffer, values, 0);
  expect(dl_comm_parameter_server_receive(server, &receive, NULL) == 0, "a receive", line);
  for (int i = 0; i < LENGTH; ++i) expect(values[i] == value, "the value", line);
}

static void done(void* context, int code, const char* message) {
  EXPECT(context == &ended && code == 0 && strcmp(message, "") == 0);
  ended += 1;
}

/* Adds 1 to the elements of a block. */
static int add_one(void* context, void* memory, size_t first, size_t count) {
  size_t* seen = (size_t*)context;
  EXPECT(first + count <= LENGTH);
  for (size_t i = 0; i < count; ++i) ((float*)memory)[i] += 1;
  *seen += count;
  return 0;
}

static int refuse(void* context, void* memory, size_t first, size_t count) {
  (void)context, (void)memory, (void)first, (void)count;
  return 7;
}

int main(void) {
  static float values[LENGTH];
  dl_comm_buffer_t buffer;
  dl_comm_group_t* group = NULL;
  dl_comm_parameter_server_t* server = NULL;
  EXPECT(dl_comm_init() == 0);
  rank = dl_comm_get_rank();
  size = dl_comm_get_nranks();
  EXPECT(dl_comm_team_group(-1, &group) == 0);

  fill(values, 3);
  dl_comm_update_t update = update_of(&buffer, values, DL_COMM_RULE_ADD);
  EXPECT(dl_comm_parameter_server_create(group, &buffer, 1, 0, &server) == 0 && server != NULL);
  expect_all(server, 3, __LINE__);
  EXPECT(dl_comm_barrier() == 0);

  fill(values, 2);
  EXPECT(dl_comm_parameter_server_send(server, &update, NULL) == 0);
  update.rule = DL_COMM_RULE_ADD_SCALED;
  update.factor = -0.5;
  update.done = done;
  update.context = &ended;
  dl_comm_work_t* work = NULL;
  EXPECT(dl_comm_parameter_server_send(server, &update, &work) == 0 && work != NULL);
  EXPECT(dl_comm_wait(work, 0) == 0 && ended == 1);
  EXPECT(dl_comm_work_free(work) == 0);
  EXPECT(dl_comm_barrier() == 0);
  expect_all(server, 3 + (float)size, __LINE__);
  EXPECT(dl_comm_barrier() == 0);

  size_t seen = 0;
  EXPECT(dl_comm_parameter_server_modify(server, 0, 0, add_one, &seen) == 0);
  EXPECT(seen == (size_t)(LENGTH / size + (rank < LENGTH % size)));
  REFUSED(dl_comm_parameter_server_modify(server, 0, 0, refuse, NULL), DL_COMM_ERROR_INVALID, "returned 7");
  REFUSED(dl_comm_parameter_server_modify(server, 1, 0, add_one, &seen), DL_COMM_ERROR_INVALID, "no tensor 1");
  EXPECT(dl_comm_barrier() == 0);
  expect_all(server, 4 + (float)size, __LINE__);
  EXPECT(dl_comm_barrier() == 0);

  update = update_of(&buffer, values, 9);
  REFUSED(dl_comm_parameter_server_send(server, &update, NULL), DL_COMM_ERROR_INVALID, "no rule");
  update.rule = DL_COMM_RULE_COPY;
  buffer.length = LENGTH - 1;
  REFUSED(dl_comm_parameter_server_send(server, &update, NULL), DL_COMM_ERROR_INVALID, "40000 elements, not 39999");
  buffer.length = LENGTH;
  buffer.dtype = DL_COMM_INT32;
  REFUSED(dl_comm_parameter_server_send(server, &update, NULL), DL_COMM_ERROR_DTYPE, "float32, not int32");
  buffer.dtype = DL_COMM_FLOAT32;
  update.first = 1;
  REFUSED(dl_comm_parameter_server_send(server, &update, NULL), DL_COMM_ERROR_INVALID, "no tensors 1 to 2");
  update.size = 1;
  REFUSED(dl_comm_parameter_server_send(server, &update, NULL), DL_COMM_ERROR_INVALID, "sizeof(dl_comm_update_t)");
  REFUSED(dl_comm_parameter_server_send(NULL, &update, NULL), DL_COMM_ERROR_INVALID, "server is NULL");

  update = update_of(&buffer, NULL, DL_COMM_RULE_ZERO);
  update.buffers = NULL;
  if (rank == 0) EXPECT(dl_comm_parameter_server_send(server, &update, NULL) == 0);
  EXPECT(dl_comm_barrier() == 0);
  expect_all(server, 0, __LINE__);
  EXPECT(dl_comm_parameter_server_close(server, 0) == 0);
  REFUSED(dl_comm_parameter_server_close(server, 0), DL_COMM_ERROR_STATE, "was closed");
  REFUSED(dl_comm_parameter_server_send(server, &update, NULL), DL_COMM_ERROR_STATE, "was closed");
  EXPECT(dl_comm_parameter_server_free(server) == 0 && dl_comm_parameter_server_free(NULL) == 0);
  EXPECT(dl_comm_group_free(group) == 0);
  EXPECT(dl_comm_finalize() == 0);
  return 0;
}
