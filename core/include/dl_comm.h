/* dl_comm: collectives on tensors over the processes of a data-parallel job.
 *
 * Every function returns 0 (or the requested number) on success and a negative DL_COMM_ERROR_* code on failure;
 * dl_comm_last_error() returns the message. Invalid arguments and calls that differ between the ranks write no data,
 * and later calls work. After a timeout or a lost rank, the team refuses further calls with the first error.
 *
 * Thread rule: every function may be called from any thread. Functions marked "collective" must be called by all
 * ranks, and those of one team or group in the same order. Calls match by their signature: collective, operator, root,
 * name, element types and shapes. If their order differs between ranks, calls with different signatures run in the
 * order of rank 0, and with DL_COMM_BY_NAME they match wherever a rank makes them. Calls with equal signatures, as
 * those without a name often have, match in the order in which each rank makes them: in different orders they would
 * combine the wrong tensors, without an error. So calls whose order may differ, those of several threads for example,
 * need names of their own. Broadcast, barrier and check_buffers_match share a team of their own. */
#ifndef DL_COMM_H
#define DL_COMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types. A mean of integers rounds toward zero; DL_COMM_BOOL (one byte, 0 or 1) has no mean, only a
 * broadcast. A complex number is a pair of floating-point numbers, the real part first. */
typedef enum dlDataType {
  DL_COMM_FLOAT16 = 0,
  DL_COMM_BFLOAT16 = 1,
  DL_COMM_FLOAT32 = 2,
  DL_COMM_FLOAT64 = 3,
  DL_COMM_INT8 = 4,
  DL_COMM_UINT8 = 5,
  DL_COMM_INT32 = 6,
  DL_COMM_INT64 = 7,
  DL_COMM_BOOL = 8,
  DL_COMM_UINT16 = 9,
  DL_COMM_UINT32 = 10,
  DL_COMM_UINT64 = 11,
  DL_COMM_INT16 = 12,
  DL_COMM_COMPLEX64 = 13, /* of two float32 */
  DL_COMM_COMPLEX128 = 14 /* of two float64 */
} dlDataType_t;

/* Error codes. */
#define DL_COMM_ERROR_INVALID (-1)   /* invalid argument */
#define DL_COMM_ERROR_DTYPE (-2)     /* element type unknown, or invalid for the operation */
#define DL_COMM_ERROR_STATE (-3)     /* before init, after finalize, or in a helper process */
#define DL_COMM_ERROR_MISMATCH (-4)  /* the ranks issued different collectives */
#define DL_COMM_ERROR_TIMEOUT (-5)   /* the deadline passed */
#define DL_COMM_ERROR_PEER_LOST (-6) /* a process of the job was lost */
#define DL_COMM_ERROR_SYSTEM (-7)    /* error of the operating system */
#define DL_COMM_ERROR_MPI (-8)       /* error of MPI */
#define DL_COMM_ERROR_INTERNAL (-9)  /* bug in dl_comm */

/* ---- The nine functions of the Cray PE DL Plugin --------------------------------------------------------------- */

/* Makes this process a rank. Initializes MPI, or adopts an initialized MPI. A process without a launcher is the rank
 * that DL_COMM_RANK, DL_COMM_SIZE and DL_COMM_ADDR name, without MPI; else rank 0 of 1. Collective. */
int dl_comm_init_mpi(void);

/* Calls dl_comm_init_mpi if necessary, and initializes everything that the other functions need. Collective. */
int dl_comm_init(void);

/* Ends the job and destroys all teams. May be called twice. Collective: waits for the other ranks until the deadline of
 * DL_COMM_TIMEOUT_S. After that the process exits with a status other than 0. Else the ranks may start again, by the
 * same launcher with the same numbers. MPI, if dl_comm initialized it, ends when the process exits, which waits until
 * the other ranks exit. Returns the error of a call that was lost on a GPU after it had succeeded, unless a call has
 * returned an error since; the job has ended then too, and the process exits with a status other than 0. */
int dl_comm_finalize(void);

/* Waits until the GPU has ended all calls that have succeeded; their deadlines bound that. Returns the error of such a
 * call that was lost on the GPU in this job: its results are not valid. Not collective. */
int dl_comm_synchronize(void);

/* Creates team `teamID` (from 0) with `nthreads_in_team` threads (at least 1). A call uses at most as many as there are
 * processors for each rank. `prec_level` 0 accumulates float16, bfloat16 and float32 tensors in float32, 1 in float64.
 * Collective. */
int dl_create_team(int teamID, int nthreads_in_team, int prec_level);

/* The same function; the plugin's documents use both names. */
int dl_comm_create_team(int teamID, int nthreads_in_team, int prec_level);

/* Replaces every tensor by its mean over all ranks and over the `ntowers` replicas of this process.
 * `all_tensors[i][j]` is tensor j of tower i, `lengths[i][j]` its number of elements, `dtypes[i][j]` its element
 * type, and `ntensors_on_tower[i]` the number of tensors of tower i. All towers have the same tensors. A missing
 * team is created with DL_COMM_DEFAULT_NTHREADS threads. Collective. */
int dl_comm_gradients(void*** all_tensors, int** lengths, dlDataType_t** dtypes, int* ntensors_on_tower, int ntowers,
                      int teamID);

/* Copies, in place, every tensor of the first tower of rank `root` to all towers of all ranks. Collective. */
int dl_comm_broadcast(void*** all_tensors, int** lengths, dlDataType_t** dtypes, int* ntensors_on_tower, int ntowers,
                      int root);

/* The rank of this process, from 0. Valid after dl_comm_init_mpi, and after dl_comm_finalize. */
int dl_comm_get_rank(void);

/* The rank of this process within its host, from 0. Valid after dl_comm_init_mpi. */
int dl_comm_localrank(void);

/* The number of ranks. Valid after dl_comm_init_mpi. */
int dl_comm_get_nranks(void);

/* ---- Beyond the plugin ----------------------------------------------------------------------------------------- */

/* The message of the calling thread's last error, "" if there was none. Valid until this thread's next error. */
const char* dl_comm_last_error(void);

/* A tensor. `src` is read and `dst` is written; they may be equal. `length` is the number of contiguous elements.
 * `shape` (`ndim` numbers) is used only to match calls between ranks, and may be NULL. If counts say how long the
 * blocks are, the ranks compare all but its first extent. */
typedef struct dl_comm_buffer {
  const void* src;
  void* dst;
  size_t length;
  dlDataType_t dtype;
  int ndim;
  const int64_t* shape;
} dl_comm_buffer_t;

/* As dl_comm_gradients for one tower, without its limit of 2^31 - 1 elements per tensor. `name` (may be NULL) is
 * part of the signature and of error messages. The team must exist; -1 is the team of broadcast and barrier.
 * Collective. */
int dl_comm_average(const dl_comm_buffer_t* buffers, size_t count, int team, const char* name);

/* As dl_comm_average for `ntowers` replicas of a list of `count` tensors, consecutive in `buffers`. `timeout` is the
 * deadline in seconds: 0 for no deadline, negative for the team's timeout. */
int dl_comm_average_towers(const dl_comm_buffer_t* buffers, size_t count, size_t ntowers, int team, const char* name,
                           double timeout);

/* The start of the blocking cool-down of a negative `ksteps`. AFTER: after |ksteps| calls, as in the plugin's
 * porting guide. LAST: the last |ksteps| calls block, as in the plugin of 2018. DEFAULT: the value of
 * DL_COMM_COOLDOWN, else AFTER. */
typedef enum dl_comm_cooldown {
  DL_COMM_COOLDOWN_DEFAULT = 0,
  DL_COMM_COOLDOWN_AFTER = 1,
  DL_COMM_COOLDOWN_LAST = 2
} dl_comm_cooldown_t;

/* Sets the schedule of a team. Without a schedule every call blocks. Calls of dl_comm_gradients and dl_comm_average
 * on the team are counted from this call on. The arguments are those of the plugin's Python function:
 * - `ksteps` > 0: the first `ksteps` calls block (warm-up); `ksteps` >= `max_steps`: all calls block; `ksteps` < 0:
 *   calls block from the position that `cooldown` defines (cool-down);
 * - the other calls are non-blocking: a call starts its own mean and returns the mean of the previous call on the
 *   same list of tensors. Every mean is returned exactly once; the last of `max_steps` calls returns all remaining
 *   means;
 * - `trans_alg`: 0 changes between the phases at once, 1 over a twentieth of `max_steps`;
 * - `verbosity`: ranks that print the time that their callers have waited: 0 none, 1 rank 0, 2 every rank. A rank
 *   prints after every call whose number (from 0) is a multiple of `perf_freq` (0: never), and at dl_comm_finalize.
 * docs/schedules.md has the rules. A missing team is created as by dl_comm_gradients;
 * otherwise the call is local. All ranks must set the same schedule: calls with different schedules do not match. */
int dl_comm_config_team(int team, int trans_alg, int ksteps, int max_steps, int verbosity, int perf_freq,
                        dl_comm_cooldown_t cooldown);

/* As dl_comm_broadcast for one tower. `timeout` as for dl_comm_average_towers. Collective. */
int dl_comm_broadcast_buffers(const dl_comm_buffer_t* buffers, size_t count, int root, const char* name,
                              double timeout);

/* ---- Ranks without a launcher -------------------------------------------------------------------------------------
 * Processes become ranks by a key-value store that all of them can use, such as torch's. On one host, MPI is not used.
 * On several, the processes start MPI through the store, once: later jobs of a process need the same rank and size.
 * After dl_comm_finalize, such a process may start again, as another rank too. A process that a rank has started (not
 * forked) may become a rank of another job in this way. */

/* Returned by `get` of a store when the time has passed and the key is not there. */
#define DL_COMM_STORE_NOT_YET 1

/* A store. Set it to zero bytes and `size` to sizeof(dl_comm_store_t) first: later versions add fields at the end. The
 * functions get `context` and a key, a C string. They return 0 on success and a negative number on failure, which ends
 * the start or the creation of a group with an error. They may be called from any thread, several at once.
 * - `set` stores `length` bytes, and replaces an earlier value.
 * - `get` waits up to `timeout` seconds (0: not at all) for the key, and returns DL_COMM_STORE_NOT_YET if it is not
 *   there. If it is, stores the value's length in `length`, and the value in `buffer` if it has at most `capacity`
 *   bytes; if it is longer, `get` is called again with a larger buffer.
 * - `add` adds `by` to the number at the key, which is 0 at first, and stores the sum. Other functions do not use the
 *   key of a number.
 * - `remove` removes a key, which need not be there. May be NULL: then all keys stay.
 * - `error` returns a description of the calling thread's last failure, valid until the thread's next call, or NULL.
 *   May be NULL. */
typedef struct dl_comm_store {
  size_t size;
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t length);
  int (*get)(void* context, const char* key, double timeout, void* buffer, size_t capacity, size_t* length);
  int (*add)(void* context, const char* key, int64_t by, int64_t* sum);
  int (*remove)(void* context, const char* key);
  const char* (*error)(void* context);
} dl_comm_store_t;

/* As dl_comm_init_mpi: makes this process rank `rank` (from 0) of `nranks`, by `store`. The structure is
 * copied; its functions and its context must stay valid until dl_comm_finalize or a failure of this function. Keys
 * begin with "dl_comm/". Waits for the other ranks until the deadline of DL_COMM_TIMEOUT_S; the error names those that
 * are missing. Collective. */
int dl_comm_init_store(const dl_comm_store_t* store, int rank, int nranks);

/* As dl_comm_init_store, by a store that rank 0 serves at `address`, "host:port". `key` is a secret of all ranks; NULL
 * or "" if only this host can reach the address. */
int dl_comm_init_address(const char* address, int rank, int nranks, const char* key);

/* ---- Every collective, on a group ---------------------------------------------------------------------------------
 * A group is an ordered set of ranks. Its calls are matched by collective, operator, root, name, element types and
 * lengths. New functions return 0 or an error code, and their values through pointers. */

/* The collectives, named as in MPI. The tensors of a call hold *blocks* of `length` elements:
 * - one block in `src` and in `dst`: ALLREDUCE, BROADCAST, REDUCE;
 * - one block in `src`, one for each rank in `dst`, in rank order: ALLGATHER, GATHER;
 * - one block for each rank in `src`, one block in `dst`: SCATTER, REDUCE_SCATTER;
 * - one block for each rank in both: ALLTOALL. Block r of `src` goes to rank r; block r of `dst` comes from rank r.
 * Only the root reads `src` in BROADCAST and SCATTER (BROADCAST writes `dst` on the root too), and only the root writes
 * `dst` in REDUCE and GATHER; the other pointer may be NULL there, but for BROADCAST. A list of tensors is one call,
 * which sends them together. A rank's own block may be the same memory in `src` and `dst`; no other memory may be both
 * read and written. */
typedef enum dl_comm_collective {
  DL_COMM_ALLREDUCE = 1,
  DL_COMM_BROADCAST = 2,
  DL_COMM_BARRIER = 3,
  DL_COMM_REDUCE = 4,
  DL_COMM_ALLGATHER = 5,
  DL_COMM_GATHER = 6,
  DL_COMM_SCATTER = 7,
  DL_COMM_REDUCE_SCATTER = 8,
  DL_COMM_ALLTOALL = 9
} dl_comm_collective_t;

/* The operators of ALLREDUCE, REDUCE and REDUCE_SCATTER. docs/collectives.md lists their element types.
 * - SUM, PRODUCT: integers wrap around. MEAN: integers round toward zero.
 * - MIN, MAX: NaN if an element is NaN, with the same bits on every rank; -0.0 is less than +0.0.
 * - BITAND, BITOR, BITXOR: of integers; of bool, the logical operation.
 * - SCALED_...: every input is multiplied by `prescale`, then comes the operator, then the result is multiplied by
 *   `postscale`. Floating point is rounded once, at the end. Integers are multiplied in float64, each time, and
 *   rounded toward zero; what the type cannot hold is unspecified.
 * - ADASUM: of ALLREDUCE, host memory, floating point: gradients are added where they are orthogonal and averaged where
 *   they are parallel, for each tensor (arXiv:2006.02924). */
typedef enum dl_comm_reduce {
  DL_COMM_SUM = 0,
  DL_COMM_MEAN = 1,
  DL_COMM_MIN = 2,
  DL_COMM_MAX = 3,
  DL_COMM_PRODUCT = 4,
  DL_COMM_BITAND = 5,
  DL_COMM_BITOR = 6,
  DL_COMM_BITXOR = 7,
  DL_COMM_SCALED_SUM = 8,
  DL_COMM_ADASUM = 9,
  DL_COMM_SCALED_MEAN = 10,
  DL_COMM_SCALED_MIN = 11,
  DL_COMM_SCALED_MAX = 12,
  DL_COMM_SCALED_PRODUCT = 13
} dl_comm_reduce_t;

/* A group. */
typedef struct dl_comm_group dl_comm_group_t;

/* A started call. */
typedef struct dl_comm_work dl_comm_work_t;

struct dl_comm_device;

/* A flag of a call: it matches the call of its name, wherever the ranks make it. Without it, calls with different
 * signatures may have another order on some ranks, but a rank must not wait for one of them before it has made those
 * that another rank makes before it. With it:
 * - A rank may wait for any of its calls, whatever others have started before it, and have any number in flight. Calls
 *   of one name match in their order. All ranks give the flag, or none.
 * - If the calls of a name differ, they fail with DL_COMM_ERROR_MISMATCH on every rank, and no other call does.
 * - Calls on the same memory take effect in the order of their rank. If the ranks need contrary orders, a call fails
 *   with DL_COMM_ERROR_MISMATCH on every rank.
 * - A call that not all ranks have made fails at its deadline with DL_COMM_ERROR_MISMATCH, and the others go on. The
 *   group's deadline ends the group, as always, if no other rank has made any call since; `timeout` does not.
 * The same order on all ranks costs nothing; a `timeout` costs an exchange of lists. The call needs a name. */
#define DL_COMM_BY_NAME 1

/* A flag of a call for dl_comm_start: a small one without DL_COMM_BY_NAME may be completed, and its `done` called, only
 * when somebody waits for it, tests or frees its handle, makes the next call of the group, or ends the group. Ranks
 * that make the same call do not wait for that. It then costs little more than a call of dl_comm_run. Ranks may differ
 * in it.
 */
#define DL_COMM_ON_WAIT 2

/* A call. Set it to zero bytes and `size` to sizeof(dl_comm_call_t) first: later versions add fields at the end.
 * - `send_counts`: the lengths of the blocks, if they differ; `length` of the tensors is ignored. An entry for each
 *   tensor and rank, those of the first tensor first: of the block that the rank contributes (ALLGATHER, GATHER) or
 *   receives (SCATTER, REDUCE_SCATTER), equal on all ranks. For ALLTOALL, of the blocks that this rank sends, and
 *   `receive_counts` of those that it receives; every pair of ranks must agree.
 * - `flags`: 0, or DL_COMM_BY_NAME and DL_COMM_ON_WAIT added.
 * - `name`: part of the signature and of messages; may be NULL.
 * - `timeout`: the deadline in seconds; 0 for the group's, negative for none.
 * - `device`: the GPU of the tensors; NULL for host memory. Without NCCL and between hosts, all but ALLREDUCE and
 *   BROADCAST go through host memory.
 * - `done`: dl_comm_start only; called once when the call has ended, with 0 or an error code and its message, on a
 *   thread of the group, or on one that starts or waits for a call of the group. It must not block, and may start
 *   calls. dl_comm_wait and dl_comm_test of other threads see the end after `done` has returned.
 * - `allocate`: ALLGATHER, GATHER and ALLTOALL of host memory, where this rank does not know how long the others'
 *   blocks are: the lengths travel inside the call. `length` is that of this rank's block of each tensor; `send_counts`
 *   is given for ALLTOALL only. `receive_counts` and every `dst` are NULL. When the lengths are known, it is called
 *   once, on a thread as for `done`: `lengths` has those of the blocks that arrive, an entry for each tensor and rank,
 *   and it stores an address for each tensor in `results`, for its blocks in the order of the ranks. In GATHER it is
 *   called on every rank, and the addresses of the root are used. It returns 0; another value is an error, with which
 *   the call fails on every rank. It must not block, nor make calls. All ranks give `allocate`, or none. */
typedef struct dl_comm_call {
  size_t size;
  int collective; /* dl_comm_collective_t */
  int reduce;     /* dl_comm_reduce_t */
  int root;
  int flags;
  const dl_comm_buffer_t* buffers;
  size_t count;
  const size_t* send_counts;
  const size_t* receive_counts;
  const char* name;
  double timeout;
  const struct dl_comm_device* device;
  double prescale;
  double postscale;
  void (*done)(void* context, int code, const char* message);
  void* context;
  int (*allocate)(void* context, const size_t* lengths, void** results);
} dl_comm_call_t;

/* Stores a handle on the group of all ranks that runs the calls of team `team` (-1: the team of broadcast and barrier).
 * Not collective. */
int dl_comm_team_group(int team, dl_comm_group_t** group);

/* Makes a group of the ranks `ranks` of the job and stores a handle: rank i of the group is ranks[i]. NULL and 0 mean
 * all ranks. Called by these ranks only, with the same arguments, on any thread; other groups may be made at the same
 * time. Groups with the same name and the same ranks are made in the same order by their members. `name` stands in
 * messages; NULL is "". The group's memory and threads are made by the first call that needs them, and its threads end
 * when it has had no calls for a second. It has the settings of DL_COMM_DEFAULT_NTHREADS and so on. A group is as safe
 * as a team, and apart from it: a failure ends this group, and a lost rank ends the groups that it is a member of. */
int dl_comm_group_create(const int* ranks, int nranks, const char* name, dl_comm_group_t** group);

/* Settings of a group. Set it to zero bytes and `size` to sizeof(dl_comm_group_options_t) first.
 * - `threads`: the number of threads; 0 for DL_COMM_DEFAULT_NTHREADS.
 * - `timeout`: the deadline of its calls in seconds; 0 for DL_COMM_TIMEOUT_S, negative for none.
 * - `algorithm`, `gpu_path`: values of DL_COMM_ALGORITHM and DL_COMM_GPU_PATH; NULL for those of the environment. */
typedef struct dl_comm_group_options {
  size_t size;
  int threads;
  double timeout;
  const char* algorithm;
  const char* gpu_path;
} dl_comm_group_options_t;

/* As dl_comm_group_create, with settings, which must be equal on all members except for the deadline; NULL: those of
 * the environment. */
int dl_comm_group_create_with(const int* ranks, int nranks, const char* name, const dl_comm_group_options_t* options,
                              dl_comm_group_t** group);

/* Frees the handle; NULL is ignored. A group that dl_comm_group_create has made ends on this rank: started calls are
 * completed first. Other members that still call it get DL_COMM_ERROR_PEER_LOST. Not collective. */
int dl_comm_group_free(dl_comm_group_t* group);

/* Ends the group after a failure: its calls, on all members, fail with DL_COMM_ERROR_PEER_LOST and an error that
 * contains `why` (UTF-8, one line; may be NULL). The handle must still be freed. Not collective. */
int dl_comm_group_abort(const dl_comm_group_t* group, const char* why);

/* Stores this process's rank in the group, and the number of the group's ranks. */
int dl_comm_group_rank(const dl_comm_group_t* group, int* rank);
int dl_comm_group_size(const dl_comm_group_t* group, int* size);

/* Stores a number by which the ops of PyTorch and TensorFlow name the group in this process: from 1, never used again.
 * Ranks may have different numbers for a group. */
int dl_comm_group_number(const dl_comm_group_t* group, uint64_t* number);

/* Starts a call and stores a handle in `work`. Does not wait for other ranks. The tensors must stay valid until the
 * call has ended, and be used only by calls of this group until then: these take effect in the order in which they were
 * started, whatever memory they share. `call` and its arrays may be freed at once. Any number of calls may be in
 * flight. An error here means that nothing was started and `done` is not called; errors of the call itself, such as
 * invalid tensors, come from dl_comm_test, dl_comm_wait and `done`. Collective. */
int dl_comm_start(const dl_comm_group_t* group, const dl_comm_call_t* call, dl_comm_work_t** work);

/* Stores in `ended` whether the call has ended, and returns its error if it has. Does not block. */
int dl_comm_test(const dl_comm_work_t* work, int* ended);

/* Waits until the call has ended and returns its error. After `timeout` seconds returns DL_COMM_ERROR_TIMEOUT, and the
 * call goes on; 0 or negative: waits until the call ends, which its own deadline bounds. Several threads may wait. */
int dl_comm_wait(const dl_comm_work_t* work, double timeout);

/* Frees the handle, also before the call has ended; NULL is ignored. */
int dl_comm_work_free(dl_comm_work_t* work);

/* As dl_comm_start and dl_comm_wait, and faster. `done` must be NULL. Collective. */
int dl_comm_run(const dl_comm_group_t* group, const dl_comm_call_t* call);

/* For ranks with less data than others: contributes zeros to the sums and means that the other ranks make on the group,
 * and takes part in their barriers, until all ranks have called it. Calls on GPUs go through host memory then. NULL: on
 * all teams. A mean still divides by the number of ranks. Stores the rank that was the last in `last` (may be NULL).
 * `timeout` in seconds; 0 or negative: no limit, since the other ranks may have much data. Other calls of the other
 * ranks fail on them with DL_COMM_ERROR_MISMATCH. Not for teams with a schedule of non-blocking calls. Afterwards the
 * groups may be used again. Collective. */
int dl_comm_join(const dl_comm_group_t* group, double timeout, int* last);

/* ---- Send and receive ---------------------------------------------------------------------------------------------
 * A message goes from one rank of a group to another, or to itself. A receive takes the first message that has its
 * source and tag; messages of one rank are taken in the order of their sends, and receives are served in the order in
 * which they were started. Messages of different groups do not mix. Nobody waits for the other rank to start: a send of
 * up to 4096 bytes (8192 between hosts) has usually ended when it returns; a longer one ends when the receiver has the
 * data. */

/* For `peer` and `tag` of a receive. */
#define DL_COMM_ANY_SOURCE (-1)
#define DL_COMM_ANY_TAG (-1)

/* A message. Set it to zero bytes and `size` to sizeof(dl_comm_message_t) first: later versions add fields at the end.
 * - `buffers`: tensors of any element types, sent one after the other: the `src` of a send, the `dst` of a receive. A
 *   received message may be shorter; dl_comm_work_status tells its length. A longer one, or one of other element types
 *   (DL_COMM_ERROR_MISMATCH), is an error of the receive, which writes nothing; the message is dropped, and the send
 *   succeeds.
 * - `peer`: the other rank of the group. `tag`: from 0.
 * - `name`: for error messages; may be NULL.
 * - `timeout`: the deadline in seconds; 0 for the group's, negative for none. A send or receive whose deadline has
 *   passed ends with DL_COMM_ERROR_TIMEOUT, and so does not end others.
 * - `done`: called once when the send or receive has ended, with 0 or an error code and its message, on the thread that
 *   completes it, which may be the caller's. It must not block, and may start others. Other threads see the end after
 *   `done` has returned.
 * - `exact`: if it is not 0, a received message must be as long as the buffers: a shorter one is an error of the
 *   receive (DL_COMM_ERROR_MISMATCH), as a longer one, and writes nothing.
 * - `device`: the GPU and the stream of the tensors; NULL, or a negative ordinal: they are in host memory. Those of the
 *   other rank may be elsewhere. A message starts after the work that is on the stream now; when it has ended, the GPU
 *   is done with the tensors, on all streams. `block_host` has no effect. Refused (DL_COMM_ERROR_STATE) while the
 *   stream is captured into a graph. */
typedef struct dl_comm_message {
  size_t size;
  const dl_comm_buffer_t* buffers;
  size_t count;
  int peer;
  int tag;
  const char* name;
  double timeout;
  void (*done)(void* context, int code, const char* message);
  void* context;
  int exact;
  const struct dl_comm_device* device;
} dl_comm_message_t;

/* What a receive has received; of a send, what it has sent. `source` is the rank that has sent the message. */
typedef struct dl_comm_status {
  int source;
  int tag;
  size_t bytes;
} dl_comm_status_t;

/* Starts to send, or to receive, and stores a handle in `work` for dl_comm_test, dl_comm_wait and dl_comm_work_free.
 * Does not block. The tensors must stay valid until the send or receive has ended, those of a receive unused by
 * everybody else; `message` and its arrays may be freed at once. An error here means that nothing was started and
 * `done` is not called. A send of up to 4 KiB does not wait for the receiver, which keeps it in its memory until it is
 * received, however many there are. */
int dl_comm_send(const dl_comm_group_t* group, const dl_comm_message_t* message, dl_comm_work_t** work);
int dl_comm_receive(const dl_comm_group_t* group, const dl_comm_message_t* message, dl_comm_work_t** work);

/* Stores the status of a send or receive that has ended, or returns its error. */
int dl_comm_work_status(const dl_comm_work_t* work, dl_comm_status_t* status);

/* Sends and receives at once, and waits for both. `send` or `receive` may be NULL, `status` (of the receive) too.
 * Faster than the functions above. `done` must be NULL. */
int dl_comm_sendrecv(const dl_comm_group_t* group, const dl_comm_message_t* send, const dl_comm_message_t* receive,
                     dl_comm_status_t* status);

/* ---- Tensors in GPU memory ----------------------------------------------------------------------------------------
 * The CUDA driver, NVRTC and NCCL are loaded by the first call that needs them; DL_COMM_ERROR_SYSTEM names a missing
 * library. docs/gpu.md describes the data paths. */

/* A GPU and a stream: the GPU's ordinal in this process, and the stream (a CUstream or cudaStream_t, NULL for the
 * default stream) that orders the tensors' earlier and later uses. If `block_host` is not 0, a call blocks until its
 * results are in memory, and does not make the stream wait. */
typedef struct dl_comm_device {
  int device;
  void* stream;
  int block_host;
} dl_comm_device_t;

/* As dl_comm_average and dl_comm_broadcast_buffers for tensors on `device` (NULL, or a negative ordinal: in host
 * memory). A call starts after the work that is on the stream at the time of the call, and later work on the stream
 * sees the result. The call returns without waiting for the GPU, unless `block_host` is set or the data goes through
 * host memory. A failure after the return fails the team. A team uses one GPU per rank; its schedule must not have
 * non-blocking calls. In a CUDA graph capture the graph gets the calls that NCCL runs; others are refused
 * (DL_COMM_ERROR_STATE). dl_comm_gradients and dl_comm_broadcast detect GPU memory by its address and use the default
 * stream. Collective. */
int dl_comm_average_on(const dl_comm_device_t* device, const dl_comm_buffer_t* buffers, size_t count, int team,
                       const char* name, double timeout);
int dl_comm_broadcast_on(const dl_comm_device_t* device, const dl_comm_buffer_t* buffers, size_t count, int root,
                         const char* name, double timeout);

/* Returns the number of GPUs visible to this process. Not collective. */
int dl_comm_gpu_count(void);

/* Returns the ordinal of the GPU that owns this memory, -1 for host memory. Not collective. */
int dl_comm_device_of_pointer(const void* memory);

/* Stores the address of `bytes` bytes of the memory of a GPU, for results. dl_comm_device_free frees it and ignores
 * NULL; like CUDA's own function it waits for the work of the GPU. Without dl_comm_init too. Not collective. */
int dl_comm_device_alloc(int device, size_t bytes, void** memory);
int dl_comm_device_free(int device, void* memory);

/* Returns 0 if the tensors (`src`) have the same bits on all ranks, else 1; all ranks get the same result. With
 * `verbose`, every rank that differs from rank 0 prints the tensors that differ. Collective. */
int dl_comm_check_buffers_match(const dl_comm_buffer_t* buffers, size_t count, int verbose);

/* A parameter server: tensors that any rank of a group reads and updates at any time, without the others taking part.
 * Each rank owns a shard of every tensor: the shard of rank r of p has n / p elements, and one more for r < n % p,
 * after those of the ranks before it. On one host whoever sends an update applies it to the owner's memory, under a
 * lock for each block of 64 KiB; between hosts a thread of the owner does. float16 and bfloat16 are stored as float32.
 */
typedef struct dl_comm_parameter_server dl_comm_parameter_server_t;

/* What an update does to the elements of the server. */
typedef enum {
  DL_COMM_RULE_ZERO = 0,       /* sets them to zero; the update has no elements */
  DL_COMM_RULE_COPY = 1,       /* replaces them */
  DL_COMM_RULE_ADD = 2,        /* adds the update; integers wrap around; not for bool */
  DL_COMM_RULE_ADD_SCALED = 3, /* adds `factor` times the update, as DL_COMM_SCALED_SUM multiplies */
} dl_comm_rule_t;

/* A send to a parameter server, or a receive from it. Set `size` to sizeof(dl_comm_update_t) and what is not used to 0.
 * `first`, `count`: the tensors, by their position in the server's list. `buffers`: a buffer for each, with as many
 * elements of the same type; `src` is sent, `dst` is received, shapes are ignored; NULL for DL_COMM_RULE_ZERO.
 * `timeout`: the deadline in seconds, 0 for the group's, negative for none. `done`, `context`: as in dl_comm_call_t. */
typedef struct {
  size_t size;
  size_t first;
  size_t count;
  const dl_comm_buffer_t* buffers;
  int rule;
  double factor;
  double timeout;
  void (*done)(void* context, int code, const char* message);
  void* context;
} dl_comm_update_t;

/* Makes a parameter server of `count` tensors on the ranks of a group and stores a handle. Collective, with the same
 * numbers of elements and types on all ranks; other ones are an error on all, as are tensors with fewer elements than
 * the group has ranks. Each shard begins with the values (`src`) of its owner. The server has a group of its own. */
int dl_comm_parameter_server_create(const dl_comm_group_t* group, const dl_comm_buffer_t* buffers, size_t count,
                                    double timeout, dl_comm_parameter_server_t** server);

/* Sends an update, or receives the values; on any thread, by any rank alone. Without `work` (NULL) it returns when all
 * is applied or received; otherwise it stores a handle for dl_comm_wait and so on. The operations of a rank take effect
 * in the order of their starts. Wrong arguments are an error and change nothing. An update is applied once, and a block
 * of 64 KiB is read whole; a tensor of several blocks may hold some blocks of an update that is under way. An operation
 * that fails later (a deadline, a lost rank) ends the server: it and all later ones fail on all ranks. */
int dl_comm_parameter_server_send(const dl_comm_parameter_server_t* server, const dl_comm_update_t* update,
                                  dl_comm_work_t** work);
int dl_comm_parameter_server_receive(const dl_comm_parameter_server_t* server, const dl_comm_update_t* update,
                                     dl_comm_work_t** work);

/* Changes a block of a shard; see dl_comm_parameter_server_modify. */
typedef int (*dl_comm_change_t)(void* context, void* memory, size_t first, size_t count);

/* Calls `change` for each block of this rank's shard of a tensor, with the memory of the block (float32 for half
 * types), the position of its first element in the tensor and the number of its elements. Others wait for the block
 * meanwhile, so it must be short and must not use the server. A value other than 0 ends the calls with an error; the
 * server goes on. */
int dl_comm_parameter_server_modify(const dl_comm_parameter_server_t* server, size_t tensor, double timeout,
                                    dl_comm_change_t change, void* context);

/* Ends the server when the operations of all ranks have ended. Collective. Later operations are an error. */
int dl_comm_parameter_server_close(const dl_comm_parameter_server_t* server, double timeout);

/* Frees the handle, and ignores NULL. Not collective. Without a close before it, the others' later operations fail. */
int dl_comm_parameter_server_free(dl_comm_parameter_server_t* server);

/* Allocates `bytes` zero bytes that all ranks of the host share, and stores the address in `memory` (NULL on error).
 * On one host, an in-place mean of tensors in such memory on all ranks needs no copies. Alignment: 64 bytes; 4096
 * for more than 2048 bytes; 2 MiB for 2 MiB or more. dl_comm_free frees the memory, even after dl_comm_finalize, and
 * ignores NULL. Not collective. */
int dl_comm_alloc(size_t bytes, void** memory);
int dl_comm_free(void* memory);

/* Memory of `bytes` bytes for a result, page-aligned, that only this process uses: that of freed results of the same
 * length, whose pages need not be made again, or new memory. It is not zeroed. NULL for less than 1 MiB, which malloc
 * serves faster, in a forked child, and if there is no memory. dl_comm_result_free frees it, and ignores NULL. Freed
 * memory is kept: as much as results have had at once, but the system may take its pages. Without dl_comm_init too.
 * Not collective. */
void* dl_comm_result_alloc(size_t bytes);
void dl_comm_result_free(void* memory);

/* Returns when every rank has called it. Collective. */
int dl_comm_barrier(void);

/* As dl_comm_barrier with a `timeout` as for dl_comm_average_towers. Collective. */
int dl_comm_barrier_timeout(double timeout);

/* Sets the deadline of future calls on the team in seconds (0: no deadline), instead of DL_COMM_TIMEOUT_S; -1 is the
 * team of broadcast and barrier. Local: the value may differ between ranks. */
int dl_comm_set_timeout(int team, double seconds);

/* Ends the use of dl_comm after a failure: the calls of the other ranks fail with an error that contains `why`
 * (UTF-8, one line; may be NULL). MPI is not finalized, so the launcher ends the job. Not collective. */
int dl_comm_abort(const char* why);

/* Returns 1 between dl_comm_init and dl_comm_finalize, else 0. */
int dl_comm_is_initialized(void);

/* Sets a function that the main thread calls about ten times a second while it waits in a call; NULL clears it. A
 * nonzero result aborts the call with DL_COMM_ERROR_PEER_LOST; calls of the other ranks that wait for it fail too.
 * The function must not call functions of this file. For languages that run signal handlers only at certain points. */
void dl_comm_set_signal_check(int (*check)(void));

/* Sends the library's log lines to `log` instead of standard error; NULL: to standard error. `log` gets a line without
 * "dl_comm: " and the end of line, or NULL: write now what you keep, because the process ends. Any thread may call it,
 * which may hold locks of the library: it must not call functions of this file, nor wait for a thread that does. In a
 * forked child it may be called, too. */
void dl_comm_set_log(void (*log)(const char* line));

/* As dl_comm_init, and creates the missing teams from 0 to `nteams` - 1 with `nthreads` threads each (0:
 * DL_COMM_DEFAULT_NTHREADS). Different arguments on the ranks are a DL_COMM_ERROR_MISMATCH. Collective. */
int dl_comm_init_teams(int nteams, int nthreads);

/* Returns 1 in a helper of a rank, else 0. A helper is a process that a rank forked or started without a launcher.
 * In a helper, dl_comm_get_rank, dl_comm_get_nranks, dl_comm_localrank, dl_comm_get_local_nranks and
 * dl_comm_get_nhosts return the rank's values; dl_comm_init_mpi, dl_comm_init and dl_comm_finalize do nothing;
 * collectives fail with DL_COMM_ERROR_STATE. */
int dl_comm_is_helper(void);

/* Creates the team if it does not exist, as dl_comm_create_team with the precision of DL_COMM_DEFAULT_PREC_LEVEL. If
 * `nthreads_in_team` is 0, the team has DL_COMM_DEFAULT_NTHREADS threads. Collective if the team does not exist. */
int dl_comm_ensure_team(int teamID, int nthreads_in_team);

/* Returns the number of created teams with ids from 0. */
int dl_comm_get_nteams(void);

/* Discards the carried means of `owner` on the team. Owners are numbers that the op libraries assign to optimizers. */
int dl_comm_release_owner(int teamID, uint64_t owner);

/* Returns the total seconds that callers of this rank have waited on the team, the value that `verbosity` prints. A
 * negative DL_COMM_ERROR_* code for an unknown team. */
double dl_comm_get_waited(int teamID);

/* For bindings that check arguments themselves: this rank has refused a call with the message `error`. Calls that the
 * other ranks have made in its place, and that match no call of this rank, fail on them with DL_COMM_ERROR_MISMATCH and
 * this message. Errors of this library about arguments do the same. Local. */
int dl_comm_note_refusal(const char* error);

/* Functions with `capacity` write at most `capacity` bytes of a text, with a terminating NUL. They return the full
 * length without the NUL, as snprintf does. */

/* The statistics of all teams since start, as a JSON object; docs/diagnosis.md describes the fields. */
int dl_comm_stats(char* text, size_t capacity);

/* Writes the recent calls of this rank and its current wait as a JSON file for `python -m dl_comm.analyze_dumps`.
 * The directory is `folder`, or the one of DL_COMM_DUMP_DIR if it is NULL. Stores the path of the file in `path`.
 * Not collective. */
int dl_comm_dump(const char* folder, char* path, size_t capacity);

/* Sets the source of an interpreter's stacks in dumps ("stacks"): a thread that writes a dump sends itself `signal`,
 * whose handler writes text to the open file `fd` at its position, as Python's faulthandler.register does. Local. */
int dl_comm_stacks_from(int signal, int fd);

/* Sets whether later starts listen for SIGUSR1, which requests a dump; by default they do. Handlers of the program run
 * too. Local. */
void dl_comm_dump_on_signal(int enabled);

/* Records the activity of all dl_comm threads of this rank to a file in `folder`, until dl_comm_timeline_stop or
 * dl_comm_finalize. `python -m dl_comm.timeline` reads the files of all ranks. DL_COMM_TIMELINE starts it at init.
 * Not collective. */
int dl_comm_timeline_start(const char* folder);
int dl_comm_timeline_stop(void);

/* Compiles the kernels for GPUs of a compute capability (90 is 9.0) into `folder`, for packagers: from a folder
 * `kernels` beside libdl_comm.so.0 they are loaded without NVRTC. Needs NVRTC here, but no GPU and no start. Returns
 * the number of files. Local. */
int dl_comm_compile_kernels(const char* folder, int capability);

/* The number of ranks on this host. Valid after dl_comm_init_mpi. */
int dl_comm_get_local_nranks(void);

/* The number of hosts. Valid after dl_comm_init_mpi. */
int dl_comm_get_nhosts(void);

/* Identifies the core in this process: equal for all users of one core, different for a second core. */
uintptr_t dl_comm_core_id(void);

/* The version of the library, "major.minor.patch". */
const char* dl_comm_version(void);

/* Writes a description of this process into `text`: one JSON object, UTF-8, terminated by NUL, cut to `capacity`
 * bytes. Returns the full length without the NUL, as snprintf does. Call it with (NULL, 0) first, then with one byte
 * more than the result, and repeat if the result has grown.
 * - Always: "version", "library" (the file of libdl_comm), "mpi" ("library_version", "standard", "library" (its
 *   file), "initialized", "finalized", "thread_level"), "state" ("not_started", "started", "finalized"), "variables"
 * (the names of all environment variables), "unknown_variables" (set variables that begin with DL_COMM_ but are
 *   unknown, each with the nearest known name or null), "group_bytes" (a list: the shared memory of a group with the
 *   default threads on one host with 1, 2, 4, ..., 512 ranks), and "settings" (the DL_COMM_* variables in their units)
 *   or "settings_error".
 * - "launcher": who has made this process, or the one that it is a helper of, a rank: "mpiexec" (any launcher that
 *   starts MPI), "torchrun", "kubernetes", "variables", "arguments" (dl_comm_init_address), "store", or "none"; null
 *   before.
 * - After dl_comm_init_mpi also "rank", "size", "hosts", "local_rank", "local_size", "ranks" (a list: "rank",
 *   "host", "host_index", "local_rank", "pid", "pid_namespace", "boot_id", "shm_device"), "teams" (a list: "id",
 *   "threads", "prec_level", "slot_bytes", "shards", and "gpu"), and with several hosts "network":
 *   the measured network model in seconds ("latency_s", "per_message_s" per additional concurrent message,
 * "per_byte_s").
 * - "gpu" is null before the first call on GPU memory, then has "path" ("nccl", "ipc", "ipc+staged", "staged" or
 *   "single_rank"), "reason" (the reason against a faster path), "sync" (with "ipc": "stream" or "host", whichever
 * waits for the other ranks), "gpu", "gpu_name", "gpu_uuid", "mps", "device_bytes" (allocated by the team) and "nccl".
 * Later versions may add names. */
int dl_comm_describe(char* text, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* DL_COMM_H */
