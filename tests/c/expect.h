/* Checks of the test programs: a difference is printed, and ends the program with status 1. */
#ifndef EXPECT_H
#define EXPECT_H

#include <dl_comm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank = -1;

static void expect(int condition, const char* what, int line) {
  if (!condition) {
    fprintf(stderr, "rank %d, line %d: expected %s; last error: %s\n", rank, line, what, dl_comm_last_error());
    exit(1);
  }
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)
/* The call is refused with this code and these words. */
#define REFUSED(call, code, words)                       \
  do {                                                   \
    EXPECT((call) == (code));                            \
    EXPECT(strstr(dl_comm_last_error(), words) != NULL); \
  } while (0)

#endif /* EXPECT_H */
