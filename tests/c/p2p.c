/* Send and receive through the C API on any number of ranks, of one host or several: lengths, tags, any source, order,
 * callbacks, truncation, errors. Exits with 1 at the first difference, which it prints. Compiles as C99 and C++11. */
#include "expect.h"

static int size = -1;
static dl_comm_group_t* group;

enum { MOST = 64, LONGEST = 3000000 };

static dl_comm_buffer_t buffer_of(void* memory, size_t length) {
  dl_comm_buffer_t buffer;
  memset(&buffer, 0, sizeof buffer);
  buffer.src = memory;
  buffer.dst = memory;
  buffer.length = length;
  buffer.dtype = DL_COMM_UINT8;
  return buffer;
}

static dl_comm_message_t message_of(dl_comm_buffer_t* buffer, int peer, int tag) {
  dl_comm_message_t message;
  memset(&message, 0, sizeof message);
  message.size = sizeof message;
  message.buffers = buffer;
  message.count = 1;
  message.peer = peer;
  message.tag = tag;
  return message;
}

static uint8_t element(int from, int tag, size_t index) {
  return (uint8_t)(index * 7 + index / 256 + (size_t)from * 31 + (size_t)tag);
}

static void fill(uint8_t* data, int tag, size_t length) {
  for (size_t i = 0; i < length; ++i) data[i] = element(rank, tag, i);
}

static void check(const uint8_t* data, int from, int tag, size_t length) {
  for (size_t i = 0; i < length; ++i) EXPECT(data[i] == element(from, tag, i));
}

static void barrier(void) { EXPECT(dl_comm_barrier() == 0); }

/* Every rank sends to the next one, itself if it is alone. */
static void around(uint8_t* src, uint8_t* dst, size_t length) {
  int next = (rank + 1) % size, last = (rank + size - 1) % size, tag = (int)(length % 1000);
  dl_comm_buffer_t from = buffer_of(src, length), into = buffer_of(dst, length + 3);
  dl_comm_message_t send = message_of(&from, next, tag), receive = message_of(&into, last, tag);
  dl_comm_status_t status;
  fill(src, tag, length);
  memset(dst, 0xee, length + 3);
  EXPECT(dl_comm_sendrecv(group, &send, &receive, &status) == 0);
  EXPECT(status.source == last && status.tag == tag && status.bytes == length);
  check(dst, last, tag, length);
  EXPECT(dst[length] == 0xee && dst[length + 2] == 0xee);

  /* As two handles, the send first: it does not wait for the receive. */
  memset(dst, 0xee, length + 3);
  dl_comm_work_t *sent = NULL, *received = NULL;
  EXPECT(dl_comm_send(group, &send, &sent) == 0 && sent != NULL);
  EXPECT(dl_comm_receive(group, &receive, &received) == 0 && received != NULL);
  int ended = 0;
  while (!ended) EXPECT(dl_comm_test(received, &ended) == 0);
  EXPECT(dl_comm_work_status(received, &status) == 0 && status.source == last && status.bytes == length);
  EXPECT(dl_comm_wait(sent, 0) == 0 && dl_comm_work_free(sent) == 0 && dl_comm_work_free(received) == 0);
  check(dst, last, tag, length);
}

/* Tensors of several types are one message. */
static void lists(void) {
  double numbers[3] = {rank + 0.5, 2, 3}, numbers_in[3] = {0, 0, 0};
  int16_t shorts[5] = {1, 2, 3, 4, (int16_t)rank}, shorts_in[5] = {0, 0, 0, 0, 0};
  dl_comm_buffer_t from[3] = {buffer_of(numbers, 3), buffer_of(shorts, 0), buffer_of(shorts, 5)};
  dl_comm_buffer_t into[2] = {buffer_of(numbers_in, 3), buffer_of(shorts_in, 5)};
  from[0].dtype = into[0].dtype = DL_COMM_FLOAT64;
  from[2].dtype = into[1].dtype = DL_COMM_INT16;
  int other = size - 1 - rank;
  dl_comm_message_t send = message_of(from, other, 1), receive = message_of(into, other, 1);
  send.count = 3;
  receive.count = 2;
  EXPECT(dl_comm_sendrecv(group, &send, &receive, NULL) == 0);
  EXPECT(numbers_in[0] == other + 0.5 && numbers_in[2] == 3 && shorts_in[0] == 1 && shorts_in[4] == other);
}

static void count_end(void* context, int code, const char* text) {
  if (code == 0 && text[0] == '\0') __atomic_add_fetch((int*)context, 1, __ATOMIC_RELAXED);
}

/* Rank 0 receives from any rank; messages of one rank come in order. The others wait for nothing but callbacks. */
static void any_source(uint8_t* data) {
  enum { MESSAGES = 40 };
  static const size_t lengths[4] = {16, 3000, 20000, 300000};
  int ended = 0;
  if (rank == 0) {
    int next[MOST] = {0};
    for (int i = 0; i < MESSAGES * (size - 1); ++i) {
      dl_comm_buffer_t into = buffer_of(data, LONGEST);
      dl_comm_message_t receive = message_of(&into, DL_COMM_ANY_SOURCE, DL_COMM_ANY_TAG);
      dl_comm_status_t status;
      EXPECT(dl_comm_sendrecv(group, NULL, &receive, &status) == 0);
      EXPECT(status.source > 0 && status.source < size && status.tag == next[status.source]);
      EXPECT(status.bytes == lengths[status.tag % 4]);
      check(data, status.source, status.tag, status.bytes);
      ++next[status.source];
    }
  } else {
    uint8_t* own = (uint8_t*)malloc(MESSAGES * lengths[3]);
    EXPECT(own != NULL);
    for (int i = 0; i < MESSAGES; ++i) {
      uint8_t* place = own + (size_t)i * lengths[3];
      fill(place, i, lengths[i % 4]);
      dl_comm_buffer_t from = buffer_of(place, lengths[i % 4]);
      dl_comm_message_t send = message_of(&from, 0, i);
      dl_comm_work_t* work = NULL;
      send.done = count_end;
      send.context = &ended;
      EXPECT(dl_comm_send(group, &send, &work) == 0 && dl_comm_work_free(work) == 0);
    }
    while (__atomic_load_n(&ended, __ATOMIC_RELAXED) < MESSAGES) {
    }
    free(own);
  }
  barrier();
}

static void errors(uint8_t* src, uint8_t* dst) {
  dl_comm_buffer_t from = buffer_of(src, 5000), into = buffer_of(dst, 4999);
  dl_comm_message_t send = message_of(&from, rank, 1), receive = message_of(&into, rank, 1);
  dl_comm_work_t *sent = NULL, *received = NULL;
  dl_comm_status_t status;
  fill(src, 1, 5000);
  dst[0] = 0xee;
  /* Too long: the receive fails, the send does not. */
  EXPECT(dl_comm_send(group, &send, &sent) == 0);
  REFUSED(dl_comm_sendrecv(group, NULL, &receive, NULL), DL_COMM_ERROR_INVALID, "has room for 4999 bytes");
  EXPECT(dst[0] == 0xee && dl_comm_wait(sent, 0) == 0 && dl_comm_work_status(sent, &status) == 0);
  EXPECT(status.source == rank && status.tag == 1 && status.bytes == 5000 && dl_comm_work_free(sent) == 0);

  /* A deadline, of the receive only; then the wait's own. */
  receive.timeout = 0.05;
  receive.name = "nobody";
  REFUSED(dl_comm_sendrecv(group, NULL, &receive, NULL), DL_COMM_ERROR_TIMEOUT,
          "the receive \"nobody\" (tag 1) from rank");
  receive.timeout = 0;
  EXPECT(dl_comm_receive(group, &receive, &received) == 0);
  REFUSED(dl_comm_wait(received, 0.05), DL_COMM_ERROR_TIMEOUT, "it goes on");
  REFUSED(dl_comm_work_status(received, &status), DL_COMM_ERROR_STATE, "has not ended");
  from.length = 10;
  EXPECT(dl_comm_sendrecv(group, &send, NULL, NULL) == 0 && dl_comm_wait(received, 0) == 0);
  EXPECT(dl_comm_work_free(received) == 0);
  check(dst, rank, 1, 10);

  send.peer = size;
  REFUSED(dl_comm_send(group, &send, &sent), DL_COMM_ERROR_INVALID, "send to rank");
  EXPECT(sent == NULL);
  send.peer = DL_COMM_ANY_SOURCE;
  REFUSED(dl_comm_send(group, &send, &sent), DL_COMM_ERROR_INVALID, "rank -1 is negative");
  send.peer = rank;
  send.tag = DL_COMM_ANY_TAG;
  REFUSED(dl_comm_send(group, &send, &sent), DL_COMM_ERROR_INVALID, "tag -1 is negative");
  send.tag = 0;
  send.size = 8;
  REFUSED(dl_comm_send(group, &send, &sent), DL_COMM_ERROR_INVALID, "sizeof(dl_comm_message_t)");
  REFUSED(dl_comm_send(group, NULL, &sent), DL_COMM_ERROR_INVALID, "message is NULL");
  REFUSED(dl_comm_send(NULL, &send, &sent), DL_COMM_ERROR_INVALID, "group is NULL");
  send.size = sizeof send;
  send.done = count_end;
  REFUSED(dl_comm_sendrecv(group, &send, NULL, NULL), DL_COMM_ERROR_INVALID, "done");
  from.src = NULL;
  send.done = NULL;
  REFUSED(dl_comm_sendrecv(group, &send, NULL, NULL), DL_COMM_ERROR_INVALID, "null");
}

int main(void) {
  EXPECT(dl_comm_init_teams(1, 1) == 0);
  EXPECT(dl_comm_team_group(0, &group) == 0);
  EXPECT(dl_comm_group_rank(group, &rank) == 0 && dl_comm_group_size(group, &size) == 0);
  uint8_t* src = (uint8_t*)malloc(LONGEST);
  uint8_t* dst = (uint8_t*)malloc(LONGEST + 3);
  void *shared_src = NULL, *shared_dst = NULL;
  EXPECT(src != NULL && dst != NULL);
  EXPECT(dl_comm_alloc(LONGEST, &shared_src) == 0 && dl_comm_alloc(LONGEST + 3, &shared_dst) == 0);
  static const size_t lengths[] = {0, 1, 8, 32, 33, 4096, 4097, 65536, 300001, LONGEST};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; ++i) {
    for (int repeat = 0; repeat < 20; ++repeat) around(src, dst, lengths[i]);
    around((uint8_t*)shared_src, (uint8_t*)shared_dst, lengths[i]);
    around(src, (uint8_t*)shared_dst, lengths[i]);
  }
  lists();
  any_source(dst);
  errors(src, dst);
  around(src, dst, 100);
  barrier();
  if (size > 1 && rank == 1) {
    /* The last message of a rank arrives, also after its finalize. */
    dl_comm_buffer_t from = buffer_of(src, 1);
    dl_comm_message_t send = message_of(&from, 0, 77);
    EXPECT(dl_comm_sendrecv(group, &send, NULL, NULL) == 0);
  } else if (size > 1 && rank == 0) {
    dl_comm_buffer_t into = buffer_of(dst, 1);
    dl_comm_message_t receive = message_of(&into, 1, 77);
    EXPECT(dl_comm_sendrecv(group, NULL, &receive, NULL) == 0);
    receive.timeout = 30;
    REFUSED(dl_comm_sendrecv(group, NULL, &receive, NULL), DL_COMM_ERROR_PEER_LOST, "has called finalize");
  }
  dl_comm_work_t* pending = NULL;
  dl_comm_buffer_t into = buffer_of(dst, 1);
  dl_comm_message_t receive = message_of(&into, rank, 99);
  EXPECT(dl_comm_receive(group, &receive, &pending) == 0);
  EXPECT(dl_comm_finalize() == 0);
  REFUSED(dl_comm_wait(pending, 0), DL_COMM_ERROR_STATE, "finalized");
  REFUSED(dl_comm_sendrecv(group, NULL, &receive, NULL), DL_COMM_ERROR_STATE, "finalized");
  EXPECT(dl_comm_work_free(pending) == 0 && dl_comm_group_free(group) == 0);
  EXPECT(dl_comm_free(shared_src) == 0 && dl_comm_free(shared_dst) == 0);
  free(src);
  free(dst);
  return 0;
}
