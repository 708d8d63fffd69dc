/* Implements trial.h. */
#define _GNU_SOURCE
#include "trial.h"

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

void* ordinary_alloc(size_t bytes) {
  void* tensor = NULL;
  return posix_memalign(&tensor, 64, (bytes + 63) / 64 * 64) ? NULL : tensor;
}

void ordinary_free(void* tensor) { free(tensor); }

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Element i of rank r is i mod 7 + 2r: means are integers, exact in every type for up to 8 ranks. */
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

/* The index of the first wrong element, or `length`. */
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

static int read_trial(FILE* in, trial_t* trial) {
  char type[8], mode[8];
  static const char* const modes[MODES] = {"list", "each", "flat"};
  if (fscanf(in, "%7s %7s %zu %zu %zu", type, mode, &trial->slots, &trial->iterations, &trial->tensors) != 5) return 0;
  trial->type = element_named(type);
  for (trial->mode = MODE_LIST; trial->mode < MODES && strcmp(mode, modes[trial->mode]);) ++trial->mode;
  if (trial->type == ELEMENTS || trial->mode == MODES) fail("trial", "unknown type or mode");
  trial->lengths = calloc(trial->tensors, sizeof *trial->lengths);
  trial->bytes = 0;
  for (size_t t = 0; t < trial->tensors; ++t) {
    if (fscanf(in, "%zu", &trial->lengths[t]) != 1) return 0;
    trial->bytes += trial->lengths[t] * element_sizes[trial->type];
  }
  return 1;
}

/* Checks the tensors of a slot; returns the number of elements, or 0 with an error text in `why`. */
static size_t check(const trial_t* trial, void** slot, double offset, char* why, size_t room) {
  size_t checked = 0;
  for (size_t t = 0; t < trial->tensors; ++t) {
    size_t at = first_wrong(trial->type, slot[t], trial->lengths[t], offset);
    if (at < trial->lengths[t]) {
      snprintf(why, room, "tensor %zu, element %zu is %g, not %g", t, at, read_element(trial->type, slot[t], at),
               value_at(at, offset));
      return 0;
    }
    checked += trial->lengths[t];
  }
  return checked;
}

static void serve(const contender_t* contender, spin_t* spin, const trial_t* trial, FILE* out) {
  const char* refusal = contender->refuse ? contender->refuse(trial) : NULL;
  if (refusal) {
    fprintf(out, "unsupported %s\n", refusal);
    return;
  }
  size_t count = trial->slots * trial->tensors;
  void** all = calloc(count, sizeof *all);
  double* times = calloc(trial->iterations, sizeof *times);
  if (!all || !times) fail("trial", "no memory");
  const double mine = 2.0 * contender->rank, mean = contender->keeps ? mine : contender->ranks - 1;
  for (size_t i = 0; i < count; ++i) {
    size_t t = i % trial->tensors;
    if (!(all[i] = contender->alloc(trial->lengths[t] * element_sizes[trial->type]))) fail("trial", "no memory");
    fill(trial->type, all[i], trial->lengths[t], mine);
  }
  char why[160] = "";
  size_t first = 0, last = 0;
  void** slot = all;
  for (size_t i = 0; i < UNTIMED + trial->iterations; ++i) {
    slot = all + i % trial->slots * trial->tensors;
    spin_synchronize(spin);
    double begin = now();
    contender->average(trial, slot);
    double end = now();
    if (i >= UNTIMED) times[i - UNTIMED] = end - begin;
    if (i == 0) {
      spin_synchronize(spin);
      first = check(trial, slot, mean, why, sizeof why);
    }
  }
  spin_synchronize(spin);
  if (first) last = check(trial, slot, mean, why, sizeof why);
  spin_synchronize(spin);
  /* Free memory before the answer, which starts the next contender. */
  for (size_t i = 0; i < count; ++i) contender->release(all[i]);
#ifdef __GLIBC__
  malloc_trim(0); /* Give memory to the other contenders. */
#endif
  if (first && last) {
    fprintf(out, "ok %zu\n", first + last);
    fwrite(times, sizeof *times, trial->iterations, out);
  } else {
    fprintf(out, "wrong rank %d: %s\n", contender->rank, why);
  }
  free(times);
  free(all);
}

void trials_serve(const contender_t* contender) {
  spin_t* spin = spin_open(getenv("BENCH_BARRIER"), contender->rank, contender->ranks);
  if (!spin) fail("BENCH_BARRIER", "cannot be mapped");
  int connection = connect_to(getenv("BENCH_SOCKET"));
  FILE *in = fdopen(connection, "r"), *out = fdopen(dup(connection), "w");
  if (!in || !out) fail("BENCH_SOCKET", "cannot be used");
  fprintf(out, "rank %d\n", contender->rank);
  fflush(out);
  for (trial_t trial; read_trial(in, &trial); free(trial.lengths)) {
    serve(contender, spin, &trial, out);
    fflush(out);
  }
  free(spin);
}
