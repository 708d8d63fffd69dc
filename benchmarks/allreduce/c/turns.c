/* The turns of turns.h. */
#define _GNU_SOURCE
#include "turns.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { PERIOD = 7, UNTIMED = 2 };

void fail(const char* what, const char* why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

void* ordinary_take(size_t bytes) {
  void* tensor = NULL;
  return posix_memalign(&tensor, 64, (bytes + 63) / 64 * 64) ? NULL : tensor;
}

void ordinary_give(void* tensor) { free(tensor); }

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Element i of rank r is i mod 7 + 2r: whole numbers, whose means are whole and exact in every type for 8 ranks. */
static double value_at(size_t i, double offset) { return (double)(i % PERIOD) + offset; }

static void write_element(element_t type, void* to, size_t i, double value) {
  switch (type) {
    case F32:
      ((float*)to)[i] = (float)value;
      break;
    case F64:
      ((double*)to)[i] = value;
      break;
    case F16:
      ((uint16_t*)to)[i] = f16_of_float((float)value);
      break;
    default:
      ((uint16_t*)to)[i] = bf16_of_float((float)value);
  }
}

static double read_element(element_t type, const void* from, size_t i) {
  switch (type) {
    case F32:
      return ((const float*)from)[i];
    case F64:
      return ((const double*)from)[i];
    case F16:
      return float_of_f16(((const uint16_t*)from)[i]);
    default:
      return float_of_bf16(((const uint16_t*)from)[i]);
  }
}

static void fill(element_t type, void* tensor, size_t length, double offset) {
  size_t whole = length < PERIOD * 64 ? length : PERIOD * 64;
  for (size_t i = 0; i < whole; ++i) write_element(type, tensor, i, value_at(i, offset));
  size_t size = element_sizes[type];
  for (size_t done = whole; done < length;) {
    size_t part = done < length - done ? done : length - done;
    memcpy((char*)tensor + done * size, tensor, part * size);
    done += part;
  }
}

/* The first element that differs, or `length`. */
static size_t first_wrong(element_t type, const void* tensor, size_t length, double offset) {
  static const double tolerance[ELEMENTS] = {[F32] = 1e-6, [F64] = 1e-15, [F16] = 1e-3, [BF16] = 8e-3};
  for (size_t i = 0; i < length; ++i) {
    double want = value_at(i, offset), off = read_element(type, tensor, i) - want;
    if (!(off <= tolerance[type] * want && -off <= tolerance[type] * want)) return i;
  }
  return length;
}

static int connect_to(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (!path || strlen(path) >= sizeof address.sun_path) fail("BENCH_SOCKET", "missing or too long");
  memcpy(address.sun_path, path, strlen(path) + 1);
  int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0 || connect(connection, (struct sockaddr*)&address, sizeof address)) fail(path, strerror(errno));
  return connection;
}

static int read_turn(FILE* in, turn_t* turn) {
  char type[8], way[8];
  static const char* const ways[WAYS] = {"list", "each", "flat"};
  if (fscanf(in, "%7s %7s %zu %zu %zu", type, way, &turn->slots, &turn->iterations, &turn->tensors) != 5) return 0;
  turn->type = element_named(type);
  for (turn->way = WAY_LIST; turn->way < WAYS && strcmp(way, ways[turn->way]);) ++turn->way;
  if (turn->type == ELEMENTS || turn->way == WAYS) fail("turn", "unknown type or way");
  turn->lengths = calloc(turn->tensors, sizeof *turn->lengths);
  turn->bytes = 0;
  for (size_t t = 0; t < turn->tensors; ++t) {
    if (fscanf(in, "%zu", &turn->lengths[t]) != 1) return 0;
    turn->bytes += turn->lengths[t] * element_sizes[turn->type];
  }
  return 1;
}

/* Compares the tensors of a slot; returns the number of elements, or 0 with words in `why`. */
static size_t check(const turn_t* turn, void** slot, double offset, char* why, size_t room) {
  size_t checked = 0;
  for (size_t t = 0; t < turn->tensors; ++t) {
    size_t at = first_wrong(turn->type, slot[t], turn->lengths[t], offset);
    if (at < turn->lengths[t]) {
      snprintf(why, room, "tensor %zu, element %zu is %g, not %g", t, at, read_element(turn->type, slot[t], at),
               value_at(at, offset));
      return 0;
    }
    checked += turn->lengths[t];
  }
  return checked;
}

static void serve(const contender_t* contender, spin_t* spin, const turn_t* turn, FILE* out) {
  const char* refusal = contender->refuse ? contender->refuse(turn) : NULL;
  if (refusal) {
    fprintf(out, "unsupported %s\n", refusal);
    return;
  }
  size_t count = turn->slots * turn->tensors;
  void** all = calloc(count, sizeof *all);
  double* times = calloc(turn->iterations, sizeof *times);
  if (!all || !times) fail("turn", "no memory");
  const double mine = 2.0 * contender->rank, mean = contender->keeps ? mine : contender->ranks - 1;
  for (size_t i = 0; i < count; ++i) {
    size_t t = i % turn->tensors;
    if (!(all[i] = contender->take(turn->lengths[t] * element_sizes[turn->type]))) fail("turn", "no memory");
    fill(turn->type, all[i], turn->lengths[t], mine);
  }
  char why[160] = "";
  size_t first = 0, last = 0;
  void** slot = all;
  for (size_t i = 0; i < UNTIMED + turn->iterations; ++i) {
    slot = all + i % turn->slots * turn->tensors;
    spin_meet(spin);
    double begin = now();
    contender->average(turn, slot);
    double end = now();
    if (i >= UNTIMED) times[i - UNTIMED] = end - begin;
    if (i == 0) {
      spin_meet(spin);
      first = check(turn, slot, mean, why, sizeof why);
    }
  }
  spin_meet(spin);
  if (first) last = check(turn, slot, mean, why, sizeof why);
  spin_meet(spin);
  /* Before the answer, which lets the next contender start. */
  for (size_t i = 0; i < count; ++i) contender->give(all[i]);
#ifdef __GLIBC__
  malloc_trim(0); /* What a waiting contender keeps, another one has not. */
#endif
  if (first && last) {
    fprintf(out, "ok %zu\n", first + last);
    fwrite(times, sizeof *times, turn->iterations, out);
  } else {
    fprintf(out, "wrong rank %d: %s\n", contender->rank, why);
  }
  free(times);
  free(all);
}

void turns_serve(const contender_t* contender) {
  spin_t* spin = spin_open(getenv("BENCH_BARRIER"), contender->rank, contender->ranks);
  if (!spin) fail("BENCH_BARRIER", "cannot be mapped");
  int connection = connect_to(getenv("BENCH_SOCKET"));
  FILE *in = fdopen(connection, "r"), *out = fdopen(dup(connection), "w");
  if (!in || !out) fail("BENCH_SOCKET", "cannot be used");
  fprintf(out, "rank %d\n", contender->rank);
  fflush(out);
  for (turn_t turn; read_turn(in, &turn); free(turn.lengths)) {
    serve(contender, spin, &turn, out);
    fflush(out);
  }
  free(spin);
}
