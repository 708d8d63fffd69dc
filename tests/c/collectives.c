/* Every collective of the C API on any number of ranks: blocking and started, blocks of different lengths, callbacks,
 * errors. Exits with 1 at the first difference, which it prints. Compiles as C99 and C++11. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "expect.h"

static int size = -1;
static dl_comm_group_t* group;

enum { MOST = 64, LONGEST = 100000 };

/* A call on one tensor. */
static dl_comm_call_t call_on(dl_comm_collective_t collective, dl_comm_buffer_t* buffer) {
  dl_comm_call_t call;
  memset(&call, 0, sizeof call);
  call.size = sizeof call;
  call.collective = collective;
  call.reduce = DL_COMM_SUM;
  call.buffers = buffer;
  call.count = 1;
  return call;
}

static dl_comm_buffer_t buffer_of(const int32_t* src, int32_t* dst, size_t length) {
  dl_comm_buffer_t buffer;
  memset(&buffer, 0, sizeof buffer);
  buffer.src = src;
  buffer.dst = dst;
  buffer.length = length;
  buffer.dtype = DL_COMM_INT32;
  return buffer;
}

/* Element `index` of the block that `from` sends to `to`. */
static int32_t element(int from, int to, size_t index) { return (int32_t)index + 1000 * from + 7 * to; }

static int32_t sum(int to, size_t index) {
  int32_t total = 0;
  for (int from = 0; from < size; ++from) total += element(from, to, index);
  return total;
}

/* Memory of a kind that this rank has. */
typedef enum { PRIVATE, HUGE_PAGES, SHARED, DIFFERENT } kind_t;

static int32_t* memory(size_t elements, kind_t kind) {
  size_t bytes = (elements + 1) * sizeof(int32_t), huge = 2 << 20;
  void* found = NULL;
  if (kind == DIFFERENT) kind = rank % 2 == 0 ? SHARED : HUGE_PAGES;
  if (kind == SHARED) {
    EXPECT(dl_comm_alloc(bytes, &found) == 0);
  } else if (kind == PRIVATE) {
    found = malloc(bytes);
  } else {
    bytes = (bytes + huge - 1) / huge * huge;
    EXPECT(posix_memalign(&found, huge, bytes) == 0);
    madvise(found, bytes, MADV_HUGEPAGE);
  }
  EXPECT(found != NULL);
  return (int32_t*)found;
}

static void release(int32_t* place, kind_t kind) {
  if (kind == SHARED || (kind == DIFFERENT && rank % 2 == 0)) {
    EXPECT(dl_comm_free(place) == 0);
  } else {
    free(place);
  }
}

static void every_collective(size_t length, int started, kind_t kind) {
  size_t all = length * (size_t)size;
  int32_t* src = memory(all, kind);
  int32_t* dst = memory(all, kind);
  for (int root = 0; root < size; ++root) {
    for (int collective = DL_COMM_ALLREDUCE; collective <= DL_COMM_ALLTOALL; ++collective) {
      dl_comm_buffer_t buffer = buffer_of(src, dst, length);
      dl_comm_call_t call = call_on((dl_comm_collective_t)collective, &buffer);
      int blocks =
          collective == DL_COMM_SCATTER || collective == DL_COMM_REDUCE_SCATTER || collective == DL_COMM_ALLTOALL;
      int rooted = collective == DL_COMM_BROADCAST || collective == DL_COMM_REDUCE || collective == DL_COMM_GATHER ||
                   collective == DL_COMM_SCATTER;
      /* Once without a root. The longest calls have one root, because checking them takes long. */
      if (root != size - 1 && (!rooted || length > LONGEST)) continue;
      call.root = root;
      for (size_t i = 0; i < all; ++i) {
        src[i] = element(rank, blocks ? (int)(i / (length ? length : 1)) : rank, length ? i % length : 0);
        dst[i] = -1;
      }
      if (started) {
        dl_comm_work_t* work = NULL;
        int ended = 0;
        EXPECT(dl_comm_start(group, &call, &work) == 0 && work != NULL);
        while (!ended) EXPECT(dl_comm_test(work, &ended) == 0);
        EXPECT(dl_comm_wait(work, 0) == 0 && dl_comm_work_free(work) == 0);
      } else {
        EXPECT(dl_comm_run(group, &call) == 0);
      }
      for (size_t i = 0; i < length; ++i) {
        int32_t expected[MOST];
        int results = 1;
        switch (collective) {
          case DL_COMM_ALLREDUCE:
          case DL_COMM_REDUCE:
            expected[0] = 0;
            for (int from = 0; from < size; ++from) expected[0] += element(from, from, i);
            if (collective == DL_COMM_REDUCE && rank != root) expected[0] = -1;
            break;
          case DL_COMM_BROADCAST:
            expected[0] = element(root, root, i);
            break;
          case DL_COMM_ALLGATHER:
          case DL_COMM_GATHER:
            results = size;
            for (int from = 0; from < size; ++from) {
              expected[from] = collective == DL_COMM_GATHER && rank != root ? -1 : element(from, from, i);
            }
            break;
          case DL_COMM_SCATTER:
            expected[0] = element(root, rank, i);
            break;
          case DL_COMM_REDUCE_SCATTER:
            expected[0] = sum(rank, i);
            break;
          case DL_COMM_ALLTOALL:
            results = size;
            for (int from = 0; from < size; ++from) expected[from] = element(from, rank, i);
            break;
          default:
            results = 0;
        }
        for (int block = 0; block < results; ++block) EXPECT(dst[(size_t)block * length + i] == expected[block]);
      }
    }
  }
  release(src, kind);
  release(dst, kind);
}

/* The system lets the last rank copy from and to the memory of other processes no longer. */
static void refuse_copies(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  if (rank != size - 1) return;
  EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  EXPECT(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

/* Rank r sends r + peer + 1 elements to each peer. */
static void blocks_of_different_lengths(void) {
  size_t send[MOST], receive[MOST], own[MOST], sent = 0, received = 0, position;
  int32_t src[4096], dst[4096];
  for (int peer = 0; peer < size; ++peer) {
    send[peer] = receive[peer] = (size_t)(rank + peer + 1);
    own[peer] = (size_t)(3 * peer);
    for (size_t i = 0; i < send[peer]; ++i) src[sent++] = element(rank, peer, i);
    received += receive[peer];
  }
  dl_comm_buffer_t buffer = buffer_of(src, dst, 0);
  dl_comm_call_t call = call_on(DL_COMM_ALLTOALL, &buffer);
  call.send_counts = send;
  call.receive_counts = receive;
  EXPECT(dl_comm_run(group, &call) == 0);
  position = 0;
  for (int from = 0; from < size; ++from) {
    for (size_t i = 0; i < receive[from]; ++i) EXPECT(dst[position++] == element(from, rank, i));
  }
  EXPECT(position == received);

  for (size_t i = 0; i < own[rank]; ++i) src[i] = element(rank, 0, i);
  call = call_on(DL_COMM_ALLGATHER, &buffer);
  call.send_counts = own;
  EXPECT(dl_comm_run(group, &call) == 0);
  position = 0;
  for (int from = 0; from < size; ++from) {
    for (size_t i = 0; i < own[from]; ++i) EXPECT(dst[position++] == element(from, 0, i));
  }
}

/* Two tensors, each with counts of its own: rank r's block of tensor t has r or, of the second, 2 * (size - r)
 * elements. */
static void lists_with_counts(void) {
  static int32_t src[2][4096], dst[2][4096];
  dl_comm_buffer_t buffers[2];
  size_t counts[2 * MOST];
  for (size_t t = 0; t < 2; ++t) {
    size_t total = 0;
    for (int peer = 0; peer < size; ++peer) {
      const size_t length = t == 0 ? (size_t)peer : (size_t)(2 * (size - peer));
      counts[t * (size_t)size + (size_t)peer] = length;
      for (size_t i = 0; i < length; ++i) src[t][total++] = (int32_t)i + peer + rank;
    }
    buffers[t] = buffer_of(src[t], dst[t], 0);
  }
  dl_comm_call_t call = call_on(DL_COMM_REDUCE_SCATTER, buffers);
  call.count = 2;
  call.send_counts = counts;
  EXPECT(dl_comm_run(group, &call) == 0);
  for (size_t t = 0; t < 2; ++t) {
    for (size_t i = 0; i < counts[t * (size_t)size + (size_t)rank]; ++i)
      EXPECT(dst[t][i] == size * ((int32_t)i + rank) + size * (size - 1) / 2);
  }
  if (size > 1) {
    /* Counts that differ between the ranks. */
    counts[2 * size - 1] += rank == 0;
    REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_MISMATCH, "");
    counts[2 * size - 1] -= rank == 0;
  }
  call.collective = DL_COMM_ALLGATHER;
  EXPECT(dl_comm_run(group, &call) == 0);
  for (size_t t = 0; t < 2; ++t) {
    size_t position = 0;
    for (int from = 0; from < size; ++from) {
      for (size_t i = 0; i < counts[t * (size_t)size + (size_t)from]; ++i)
        EXPECT(dst[t][position++] == src[t][i] - rank + from);
    }
  }
}

/* Room for the results of calls of unknown lengths. */
typedef struct {
  size_t tensors, lengths[3 * MOST];
  int32_t values[3][4096];
  int refuses;
} room_t;

static int allocate(void* context, const size_t* lengths, void** results) {
  room_t* room = (room_t*)context;
  if (room->refuses) return 7;
  memcpy(room->lengths, lengths, room->tensors * (size_t)size * sizeof *lengths);
  for (size_t t = 0; t < room->tensors; ++t) results[t] = room->values[t];
  return 0;
}

/* Rank r sends r + receiver + tensor elements; no rank knows what the others send. */
static void unknown_lengths(void) {
  static int32_t src[3][4096];
  static room_t room;
  dl_comm_buffer_t buffers[3];
  size_t sent[3 * MOST];
  for (int collective = DL_COMM_ALLGATHER; collective <= DL_COMM_ALLTOALL; ++collective) {
    if (collective != DL_COMM_ALLGATHER && collective != DL_COMM_ALLTOALL) continue;
    const int pairs = collective == DL_COMM_ALLTOALL;
    for (size_t tensors = 1; tensors <= 3; ++tensors) {
      for (int started = 0; started < 2; ++started) {
        for (size_t t = 0; t < tensors; ++t) {
          size_t total = 0;
          for (int to = 0; to < (pairs ? size : 1); ++to) {
            const size_t length = (size_t)(rank + to) + t;
            sent[t * (size_t)size + (size_t)to] = length;
            for (size_t i = 0; i < length; ++i) src[t][total++] = element(rank, to, i + t);
          }
          buffers[t] = buffer_of(src[t], NULL, total);
        }
        memset(&room, 0, sizeof room);
        room.tensors = tensors;
        dl_comm_call_t call = call_on((dl_comm_collective_t)collective, buffers);
        call.count = tensors;
        call.send_counts = pairs ? sent : NULL;
        call.allocate = allocate;
        call.context = &room;
        if (started) {
          dl_comm_work_t* work = NULL;
          EXPECT(dl_comm_start(group, &call, &work) == 0);
          EXPECT(dl_comm_wait(work, 0) == 0 && dl_comm_work_free(work) == 0);
        } else {
          EXPECT(dl_comm_run(group, &call) == 0);
        }
        for (size_t t = 0; t < tensors; ++t) {
          size_t position = 0;
          const int to = pairs ? rank : 0;
          for (int from = 0; from < size; ++from) {
            const size_t length = (size_t)(from + to) + t;
            EXPECT(room.lengths[t * (size_t)size + (size_t)from] == length);
            for (size_t i = 0; i < length; ++i) {
              EXPECT(room.values[t][position++] == element(from, to, i + t));
            }
          }
        }
      }
    }
  }
  dl_comm_call_t call = call_on(DL_COMM_ALLGATHER, buffers);
  room.tensors = 1;
  call.allocate = allocate;
  call.context = &room;
  room.refuses = rank == 0;
  const int code = dl_comm_run(group, &call);
  EXPECT(code == (rank == 0 ? DL_COMM_ERROR_SYSTEM : DL_COMM_ERROR_MISMATCH));
  room.refuses = 0;
  EXPECT(dl_comm_run(group, &call) == 0);
  call.send_counts = sent;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "allocate");
  call = call_on(DL_COMM_GATHER, buffers);
  call.root = size - 1;
  call.allocate = allocate;
  call.context = &room;
  EXPECT(dl_comm_run(group, &call) == 0);
  /* The input is that of the last ALLTOALL. */
  for (int from = 0; from < size; ++from) EXPECT(room.lengths[from] == (size_t)(size * from + size * (size - 1) / 2));
  EXPECT(rank != size - 1 || size < 2 || room.values[0][room.lengths[0]] == element(1, 0, 0));
  call = call_on(DL_COMM_BROADCAST, buffers);
  call.allocate = allocate;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "lengths");
}

static void count_call(void* context, int code, const char* message) {
  if (code == 0 && message[0] == '\0') __atomic_add_fetch((int*)context, 1, __ATOMIC_RELAXED);
}

/* Handles are waited for in another order than they were started, or not at all. */
static void many_in_flight(void) {
  enum { CALLS = 50, LENGTH = 1000 };
  static int32_t src[CALLS][LENGTH], dst[CALLS][LENGTH];
  dl_comm_buffer_t buffers[CALLS];
  dl_comm_work_t* works[CALLS];
  char names[CALLS][8];
  int ended = 0;
  for (int c = 0; c < CALLS; ++c) {
    for (int i = 0; i < LENGTH; ++i) src[c][i] = rank + c;
    buffers[c] = buffer_of(src[c], dst[c], LENGTH);
    dl_comm_call_t call = call_on(DL_COMM_ALLREDUCE, &buffers[c]);
    snprintf(names[c], sizeof names[c], "c%d", c);
    call.name = names[c];
    call.reduce = DL_COMM_MAX;
    call.done = count_call;
    call.context = &ended;
    EXPECT(dl_comm_start(group, &call, &works[c]) == 0);
    if (c % 5 == 4) EXPECT(dl_comm_work_free(works[c]) == 0);
  }
  for (int c = CALLS - 1; c >= 0; --c) {
    if (c % 5 != 4) EXPECT(dl_comm_wait(works[c], 60) == 0 && dl_comm_work_free(works[c]) == 0);
  }
  dl_comm_call_t barrier = call_on(DL_COMM_BARRIER, NULL);
  barrier.count = 0;
  EXPECT(dl_comm_run(group, &barrier) == 0);
  EXPECT(__atomic_load_n(&ended, __ATOMIC_RELAXED) == CALLS);
  for (int c = 0; c < CALLS; ++c) {
    for (int i = 0; i < LENGTH; ++i) EXPECT(dst[c][i] == size - 1 + c);
  }
}

/* Calls that whoever waits may complete. Ranks differ in how they make them, and in what they do with the handles. */
static void on_wait(void) {
  enum { CALLS = 60, LENGTH = 3 };
  static int32_t values[CALLS][LENGTH];
  int started = 0, ended = 0;
  dl_comm_work_t* later = NULL;
  for (int c = 0; c < CALLS; ++c) {
    for (int i = 0; i < LENGTH; ++i) values[c][i] = rank + c;
    dl_comm_buffer_t buffer = buffer_of(values[c], values[c], LENGTH);
    dl_comm_call_t call = call_on(DL_COMM_ALLREDUCE, &buffer);
    call.reduce = DL_COMM_MAX;
    const int how = c < 2 ? 0 : (c * (rank + 1)) % 6;
    if (how == 0) {
      EXPECT(dl_comm_run(group, &call) == 0);
      continue;
    }
    call.flags = DL_COMM_ON_WAIT;
    call.done = count_call;
    call.context = &ended;
    dl_comm_work_t* work;
    EXPECT(dl_comm_start(group, &call, &work) == 0);
    ++started;
    int has_ended = 0;
    if (how == 1) EXPECT(dl_comm_wait(work, 0) == 0);
    if (how == 2) EXPECT(dl_comm_wait(work, 60) == 0);
    while (how == 3 && has_ended == 0) EXPECT(dl_comm_test(work, &has_ended) == 0);
    if (how == 4 && later == NULL) {
      later = work;
      continue;
    }
    EXPECT(dl_comm_work_free(work) == 0);
  }
  if (later != NULL) EXPECT(dl_comm_wait(later, 0) == 0 && dl_comm_work_free(later) == 0);
  dl_comm_call_t barrier = call_on(DL_COMM_BARRIER, NULL);
  barrier.count = 0;
  EXPECT(dl_comm_run(group, &barrier) == 0);
  EXPECT(__atomic_load_n(&ended, __ATOMIC_RELAXED) == started);
  for (int c = 0; c < CALLS; ++c) {
    for (int i = 0; i < LENGTH; ++i) EXPECT(values[c][i] == size - 1 + c);
  }
}

/* Small calls that differ from the call before in some words, with refused calls between. */
static void repeated(void) {
  enum { CALLS = 400, LENGTH = 4, SETS = 3 };
  int32_t src[SETS][LENGTH + 1], dst[SETS][LENGTH + 1];
  char name[2] = "a";
  int64_t shape[2] = {2, 2};
  unsigned random = 1; /* the same on all ranks */
  for (int c = 0; c < CALLS; ++c) {
    random = random * 1103515245u + 12345u;
    unsigned bits = random >> 8;
    int set = (int)(bits % SETS), is_max = bits >> 4 & 1, moves = bits >> 5 & 1, root = (int)(bits >> 6) % size;
    size_t length = bits >> 10 & 1 ? LENGTH : 1;
    for (int repeat = 0; repeat < 3; ++repeat) {
      for (int i = 0; i <= LENGTH; ++i) src[set][i] = 10 * c + 3 * repeat + i + rank, dst[set][i] = -1;
      dl_comm_buffer_t buffer = buffer_of(src[set], dst[set], length);
      dl_comm_call_t call = call_on(moves ? DL_COMM_BROADCAST : DL_COMM_ALLREDUCE, &buffer);
      call.root = root;
      if (is_max) call.reduce = DL_COMM_MAX;
      name[0] = (char)('a' + repeat % 2);
      if (bits >> 11 & 1) call.name = name;
      shape[0] = repeat == 1 ? 4 : 2, shape[1] = repeat == 1 ? 1 : 2;
      if (length == LENGTH && (bits >> 12 & 1)) buffer.shape = shape, buffer.ndim = 2;
      EXPECT(dl_comm_run(group, &call) == 0);
      for (size_t i = 0; i < LENGTH; ++i) {
        int32_t first = 10 * c + 3 * repeat + (int32_t)i;
        int32_t result = moves ? first + root : is_max ? first + size - 1 : size * first + size * (size - 1) / 2;
        EXPECT(dst[set][i] == (i < length ? result : -1));
      }
      if (bits >> 13 & 1) {
        if (bits >> 14 & 1)
          buffer.dst = NULL, buffer.src = NULL;
        else
          buffer.dst = (char*)buffer.dst + 1, buffer.src = (const char*)buffer.src + 1;
        for (int again = 0; again < 2; ++again) EXPECT(dl_comm_run(group, &call) == DL_COMM_ERROR_INVALID);
      }
    }
  }
}

static void operators(void) {
  double src = rank + 1.0, dst = 0;
  dl_comm_buffer_t buffer;
  memset(&buffer, 0, sizeof buffer);
  buffer.src = &src;
  buffer.dst = &dst;
  buffer.length = 1;
  buffer.dtype = DL_COMM_FLOAT64;
  dl_comm_call_t call = call_on(DL_COMM_ALLREDUCE, &buffer);
  double product = 1;
  for (int r = 1; r <= size; ++r) product *= r;
  double results[] = {size * (size + 1) / 2.0, (size + 1) / 2.0, 1.0, (double)size, product};
  for (int reduce = DL_COMM_SUM; reduce <= DL_COMM_PRODUCT; ++reduce) {
    call.reduce = reduce;
    EXPECT(dl_comm_run(group, &call) == 0 && dst == results[reduce]);
  }
  const int scaled[] = {DL_COMM_SCALED_SUM, DL_COMM_SCALED_MEAN, DL_COMM_SCALED_MIN, DL_COMM_SCALED_MAX,
                        DL_COMM_SCALED_PRODUCT};
  call.prescale = 2;
  call.postscale = 0.25;
  for (int i = 0; i < 5; ++i) {
    const double power = i == 4 ? 1 << size : 2; /* a product has every input's factor */
    call.reduce = scaled[i];
    EXPECT(dl_comm_run(group, &call) == 0 && dst == results[i] * power / 4);
  }
  /* Integers are rounded toward zero after each factor. */
  int32_t integer = -3 * (rank + 1);
  buffer.src = buffer.dst = &integer;
  buffer.dtype = DL_COMM_INT32;
  call.reduce = DL_COMM_SCALED_MIN;
  call.prescale = call.postscale = 0.5;
  EXPECT(dl_comm_run(group, &call) == 0 && integer == -3 * size / 2 / 2);
  buffer.src = &src;
  buffer.dst = &dst;
  buffer.dtype = DL_COMM_FLOAT64;
  call.reduce = DL_COMM_BITOR;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_DTYPE, "bit_or");
}

/* Orthogonal vectors are added, equal ones averaged; each tensor by itself. */
static void adasum(void) {
  float orthogonal[MOST] = {0}, equal[3] = {1, 2, 3};
  dl_comm_buffer_t buffers[2];
  memset(buffers, 0, sizeof buffers);
  buffers[0].src = buffers[0].dst = orthogonal;
  buffers[0].length = (size_t)size;
  buffers[1].src = buffers[1].dst = equal;
  buffers[1].length = 3;
  buffers[0].dtype = buffers[1].dtype = DL_COMM_FLOAT32;
  dl_comm_call_t call = call_on(DL_COMM_ALLREDUCE, buffers);
  call.count = 2;
  call.reduce = DL_COMM_ADASUM;
  for (int started = 0; started < 2; ++started) {
    for (int i = 0; i < size; ++i) orthogonal[i] = i == rank ? 5.0f : 0.0f;
    if (started) {
      dl_comm_work_t* work = NULL;
      EXPECT(dl_comm_start(group, &call, &work) == 0 && dl_comm_wait(work, 0) == 0 && dl_comm_work_free(work) == 0);
    } else {
      EXPECT(dl_comm_run(group, &call) == 0);
    }
    for (int i = 0; i < size; ++i) EXPECT(orthogonal[i] == 5.0f);
    for (int i = 0; i < 3; ++i) EXPECT(equal[i] == (float)(i + 1));
  }
  call.collective = DL_COMM_REDUCE_SCATTER;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "adasum is an operator of allreduce");
}

/* Calls that match by name, in contrary orders; rank 0 has all in flight, and waits for the last first. */
static void by_name(void) {
  enum { CALLS = 100, LENGTH = 300 };
  static int32_t data[CALLS][LENGTH];
  char names[CALLS][24];
  dl_comm_work_t* works[CALLS] = {NULL};
  for (int index = 0; index < CALLS; ++index) {
    const int number = rank == 0 ? index : CALLS - 1 - index;
    snprintf(names[number], sizeof names[number], "call %d", number);
    for (size_t at = 0; at < LENGTH; ++at) data[number][at] = element(rank, number, at);
    dl_comm_buffer_t buffer = buffer_of(data[number], data[number], LENGTH);
    dl_comm_call_t call = call_on(DL_COMM_ALLREDUCE, &buffer);
    call.name = names[number];
    call.flags = DL_COMM_BY_NAME;
    if (rank == 0) {
      EXPECT(dl_comm_start(group, &call, &works[number]) == 0);
    } else {
      EXPECT(dl_comm_run(group, &call) == 0);
    }
  }
  for (int number = CALLS - 1; number >= 0; --number) {
    if (rank == 0) EXPECT(dl_comm_wait(works[number], 0) == 0 && dl_comm_work_free(works[number]) == 0);
    for (size_t at = 0; at < LENGTH; ++at) EXPECT(data[number][at] == sum(number, at));
  }

  int32_t value = 1;
  dl_comm_buffer_t buffer = buffer_of(&value, &value, 1);
  dl_comm_call_t call = call_on(DL_COMM_ALLREDUCE, &buffer);
  call.flags = DL_COMM_BY_NAME;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "needs a name");
  call.name = "a name";
  call.flags = 4 | DL_COMM_BY_NAME;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "flags is 5");
  if (size > 1) {
    call.flags = DL_COMM_BY_NAME;
    call.reduce = rank == 0 ? DL_COMM_SUM : DL_COMM_MAX;
    REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_MISMATCH, "'a name' by name");
  }
  EXPECT(value == 1);
}

static void errors(void) {
  int32_t data[2 * MOST] = {0};
  dl_comm_buffer_t buffer = buffer_of(data, data + MOST, 1);
  dl_comm_call_t call = call_on(DL_COMM_ALLREDUCE, &buffer);
  dl_comm_work_t* work = (dl_comm_work_t*)data;
  dl_comm_group_t* none = (dl_comm_group_t*)data;
  REFUSED(dl_comm_run(NULL, &call), DL_COMM_ERROR_INVALID, "group is NULL");
  REFUSED(dl_comm_start(group, NULL, &work), DL_COMM_ERROR_INVALID, "call is NULL");
  EXPECT(work == NULL);
  REFUSED(dl_comm_start(group, &call, NULL), DL_COMM_ERROR_INVALID, "work is NULL");
  REFUSED(dl_comm_team_group(63, &none), DL_COMM_ERROR_INVALID, "team 63");
  EXPECT(none == NULL && dl_comm_group_free(NULL) == 0 && dl_comm_work_free(NULL) == 0);
  call.size = 8;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "sizeof(dl_comm_call_t)");
  call = call_on((dl_comm_collective_t)99, &buffer);
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "99");
  call = call_on(DL_COMM_GATHER, &buffer);
  call.root = size;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "is not a rank");
  call.root = -1;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "negative");
  call = call_on(DL_COMM_ALLTOALL, &buffer);
  size_t counts[MOST] = {0};
  call.send_counts = counts;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "receive_counts");
  call = call_on(DL_COMM_ALLREDUCE, &buffer);
  call.done = count_call;
  REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_INVALID, "done");

  /* The errors of a started call are in its handle. */
  buffer.src = NULL;
  call = call_on(DL_COMM_ALLREDUCE, &buffer);
  int ended = 0;
  EXPECT(dl_comm_start(group, &call, &work) == 0);
  REFUSED(dl_comm_test(work, &ended), DL_COMM_ERROR_INVALID, "null");
  EXPECT(ended == 1 && dl_comm_wait(work, 1) == DL_COMM_ERROR_INVALID && dl_comm_work_free(work) == 0);

  if (size > 1) {
    buffer = buffer_of(data, data + MOST, 1);
    call = call_on(rank == 0 ? DL_COMM_ALLGATHER : DL_COMM_ALLTOALL, &buffer);
    REFUSED(dl_comm_run(group, &call), DL_COMM_ERROR_MISMATCH, "all-gather");
    EXPECT(strstr(dl_comm_last_error(), "all-to-all") != NULL);
  }
}

int main(void) {
  EXPECT(dl_comm_init_teams(1, 2) == 0);
  EXPECT(dl_comm_team_group(0, &group) == 0);
  EXPECT(dl_comm_group_rank(group, &rank) == 0 && dl_comm_group_size(group, &size) == 0);
  EXPECT(rank == dl_comm_get_rank() && size == dl_comm_get_nranks());
  for (int started = 0; started < 2; ++started) {
    for (int repeat = 0; repeat < 3; ++repeat) every_collective(5, started, PRIVATE);
    every_collective(0, started, PRIVATE);
    for (int kind = PRIVATE; kind <= DIFFERENT; ++kind) {
      every_collective(LONGEST, started, (kind_t)kind);
      every_collective(LONGEST * 11, started, (kind_t)kind);
    }
  }
  blocks_of_different_lengths();
  lists_with_counts();
  unknown_lengths();
  many_in_flight();
  on_wait();
  repeated();
  operators();
  adasum();
  by_name();
  errors();
  refuse_copies();
  for (int kind = PRIVATE; kind <= DIFFERENT; ++kind) every_collective(LONGEST * 3, 0, (kind_t)kind);
  every_collective(17, 0, PRIVATE);
  dl_comm_group_t* late = NULL;
  /* A call that nobody waits for ends with its group. */
  int32_t value = rank;
  int ended = 0;
  dl_comm_buffer_t buffer = buffer_of(&value, &value, 1);
  dl_comm_call_t unwaited = call_on(DL_COMM_ALLREDUCE, &buffer);
  unwaited.reduce = DL_COMM_MAX;
  for (int c = 0; c < 2; ++c) EXPECT(dl_comm_run(group, &unwaited) == 0);
  unwaited.flags = DL_COMM_ON_WAIT;
  unwaited.done = count_call;
  unwaited.context = &ended;
  dl_comm_work_t* work;
  EXPECT(dl_comm_start(group, &unwaited, &work) == 0);
  EXPECT(dl_comm_team_group(0, &late) == 0 && dl_comm_group_free(group) == 0);
  EXPECT(dl_comm_finalize() == 0);
  EXPECT(ended == 1 && value == size - 1 && dl_comm_work_free(work) == 0);
  dl_comm_call_t call = call_on(DL_COMM_BARRIER, NULL);
  call.count = 0;
  EXPECT(dl_comm_run(late, &call) == DL_COMM_ERROR_STATE && dl_comm_group_free(late) == 0);
  return 0;
}
