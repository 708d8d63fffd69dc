/* dl_comm: averages and broadcasts of tensors over the processes of a data-parallel job.
 *
 * Every function returns 0 (or the number that it is asked for) on success and a negative DL_COMM_ERROR_* code on
 * failure; dl_comm_last_error() then has the words. Bad arguments and calls that differ between the ranks move no data
 * and leave everything usable; after a timeout or a lost peer the team refuses further calls with the first error.
 *
 * Thread rule: every function may be called from any thread. Functions marked "collective" must be called by all ranks,
 * which are lined up by what they call when their order differs (broadcast, barrier and check_buffers_match share a
 * team of their own). Calls that look alike, without a name say, should come in one order.
 */
#ifndef DL_COMM_H
#define DL_COMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types. A mean of integers rounds toward zero; DL_COMM_BOOL can be broadcast only. */
typedef enum dlDataType {
  DL_COMM_FLOAT16 = 0,
  DL_COMM_BFLOAT16 = 1,
  DL_COMM_FLOAT32 = 2,
  DL_COMM_FLOAT64 = 3,
  DL_COMM_INT8 = 4,
  DL_COMM_UINT8 = 5,
  DL_COMM_INT32 = 6,
  DL_COMM_INT64 = 7,
  DL_COMM_BOOL = 8
} dlDataType_t;

/* Error codes. */
#define DL_COMM_ERROR_INVALID (-1)   /* an argument is wrong */
#define DL_COMM_ERROR_DTYPE (-2)     /* the element type has no meaning for the operation */
#define DL_COMM_ERROR_STATE (-3)     /* not initialised, finalised already, or called in a helper */
#define DL_COMM_ERROR_MISMATCH (-4)  /* the ranks called different things */
#define DL_COMM_ERROR_TIMEOUT (-5)   /* the deadline passed */
#define DL_COMM_ERROR_PEER_LOST (-6) /* a process of the job ended */
#define DL_COMM_ERROR_SYSTEM (-7)    /* the operating system refused something */
#define DL_COMM_ERROR_MPI (-8)       /* MPI refused something */
#define DL_COMM_ERROR_INTERNAL (-9)  /* a defect of dl_comm */

/* ---- The nine functions of the Cray PE DL Plugin --------------------------------------------------------------- */

/* Brings MPI up, or adopts an MPI that is up; a process without a launcher is rank 0 of 1. Collective. */
int dl_comm_init_mpi(void);

/* Brings MPI up when it is not, and everything that the other functions need. Collective. */
int dl_comm_init(void);

/* Ends every team, and MPI where dl_comm brought it up. May be called twice. Collective: it waits for the other ranks,
 * up to the deadline of DL_COMM_TIMEOUT_S, after which it leaves MPI as it is, and the process will not end with
 * status 0. */
int dl_comm_finalize(void);

/* Creates team `teamID` (from 0) with `nthreads_in_team` threads (at least 1); `prec_level` 0 adds float16, bfloat16
 * and float32 tensors up in float32, 1 in float64. Collective. */
int dl_create_team(int teamID, int nthreads_in_team, int prec_level);

/* The same function by the other name that the documents of the plugin use. */
int dl_comm_create_team(int teamID, int nthreads_in_team, int prec_level);

/* Averages, in place, every tensor over all ranks and over the `ntowers` replicas of this process.
 * `all_tensors[i][j]` is tensor j of tower i, `lengths[i][j]` its number of elements, `dtypes[i][j]` its element type,
 * `ntensors_on_tower[i]` the number of tensors of tower i. All towers have the same tensors. A team that was not
 * created is created with DL_COMM_DEFAULT_NTHREADS threads. Collective. */
int dl_comm_gradients(void*** all_tensors, int** lengths, dlDataType_t** dtypes, int* ntensors_on_tower, int ntowers,
                      int teamID);

/* Copies, in place, every tensor of the first tower of rank `root` to all towers of all ranks. Collective. */
int dl_comm_broadcast(void*** all_tensors, int** lengths, dlDataType_t** dtypes, int* ntensors_on_tower, int ntowers,
                      int root);

/* The rank of this process, from 0. Valid after dl_comm_init_mpi, also after dl_comm_finalize. */
int dl_comm_get_rank(void);

/* The rank of this process among those of its host, from 0. Valid after dl_comm_init_mpi. */
int dl_comm_localrank(void);

/* The number of processes. Valid after dl_comm_init_mpi. */
int dl_comm_get_nranks(void);

/* ---- Beyond the plugin ----------------------------------------------------------------------------------------- */

/* The words of the last error of the calling thread, "" if there was none. Valid until its next failing call. */
const char* dl_comm_last_error(void);

/* One tensor. `src` is read, `dst` is written; they may be equal. `length` counts elements, which lie without gaps.
 * `shape` (of `ndim` numbers) serves the check that all ranks call the same thing and may be NULL. */
typedef struct dl_comm_buffer {
  const void* src;
  void* dst;
  size_t length;
  dlDataType_t dtype;
  int ndim;
  const int64_t* shape;
} dl_comm_buffer_t;

/* dl_comm_gradients for one tower, without its limit of 2^31 - 1 elements a tensor. `name` (may be NULL) is part of
 * what all ranks must agree on, and stands in error messages. The team exists; -1 is the team of broadcast and barrier.
 * Collective. */
int dl_comm_average(const dl_comm_buffer_t* buffers, size_t count, int team, const char* name);

/* dl_comm_average for `ntowers` replicas of a list of `count` tensors, which follow each other in `buffers`. `timeout`
 * is the longest that the call may take, in seconds: 0 for no limit, negative for that of the team. */
int dl_comm_average_towers(const dl_comm_buffer_t* buffers, size_t count, size_t ntowers, int team, const char* name,
                           double timeout);

/* Where the blocking cool-down of a negative `ksteps` begins: after |ksteps| calls, as the plugin's porting guide says,
 * or so that the last |ksteps| calls block, as the plugin of 2018 did. DEFAULT is what DL_COMM_COOLDOWN says, else
 * AFTER. */
typedef enum dl_comm_cooldown {
  DL_COMM_COOLDOWN_DEFAULT = 0,
  DL_COMM_COOLDOWN_AFTER = 1,
  DL_COMM_COOLDOWN_LAST = 2
} dl_comm_cooldown_t;

/* The schedule of the averages of a team, counted in calls of dl_comm_gradients and dl_comm_average on it from this
 * call on; without one every call blocks. The arguments are those of the plugin's Python function:
 * - `ksteps` > 0: that many calls block (warm-up); `ksteps` >= `max_steps`: all do; < 0: calls block from where
 * `cooldown` says (cool-down);
 * - the other calls are non-blocking: a call starts its own average and returns that of the call before on the same
 * list of tensors. Every mean is returned exactly once; the last of `max_steps` calls returns what is left;
 * - `trans_alg` 0 passes from one phase to the other at once, 1 over a twentieth of `max_steps`;
 * - `verbosity` 0 prints nothing, 1 on rank 0, 2 on every rank: how long the caller has waited, after every call whose
 *   number (from 0) is a multiple of `perf_freq` (0: never), and at dl_comm_finalize.
 * core/src/schedule.rs has the rules in full. A team that does not exist is created as by dl_comm_gradients; else the
 * call is local, but all ranks must set the same schedule: averages on different ones do not match. */
int dl_comm_config_team(int team, int trans_alg, int ksteps, int max_steps, int verbosity, int perf_freq,
                        dl_comm_cooldown_t cooldown);

/* dl_comm_broadcast for one tower. `timeout` is as for dl_comm_average_towers. Collective. */
int dl_comm_broadcast_buffers(const dl_comm_buffer_t* buffers, size_t count, int root, const char* name,
                              double timeout);

/* ---- Tensors in the memory of a GPU ------------------------------------------------------------------------------
 * The CUDA driver, NVRTC and NCCL are loaded at the first call that needs them; DL_COMM_ERROR_SYSTEM tells what is
 * missing. docs/gpu.md has the ways that the data takes. */

/* Where tensors are: the number of the GPU in this process, and the stream (a CUstream or cudaStream_t, NULL for the
 * default one) on which they were made and will be used. With `block_host` other than 0 a call returns when the results
 * are there, and the stream goes on meanwhile. */
typedef struct dl_comm_device {
  int device;
  void* stream;
  int block_host;
} dl_comm_device_t;

/* dl_comm_average and dl_comm_broadcast_buffers for tensors of `device` (NULL, or a negative number: of the host).
 * They start when what is on the stream at the time of the call is done, and return when what is put on the stream from
 * then on will see the result: neither waits for the GPU, unless the device says so or the data goes through host
 * memory. A failure that comes after that ends the team. A team has one GPU on each rank; its schedule must not have
 * non-blocking calls. A stream that is being captured into a CUDA graph is refused (DL_COMM_ERROR_STATE).
 * dl_comm_gradients and dl_comm_broadcast tell a GPU's memory by its address and take its default stream. Collective.
 */
int dl_comm_average_on(const dl_comm_device_t* device, const dl_comm_buffer_t* buffers, size_t count, int team,
                       const char* name, double timeout);
int dl_comm_broadcast_on(const dl_comm_device_t* device, const dl_comm_buffer_t* buffers, size_t count, int root,
                         const char* name, double timeout);

/* Returns the number of GPUs that this process sees. Not collective. */
int dl_comm_gpu_count(void);

/* Returns the number of the GPU whose memory this is, -1 for host memory. Not collective. */
int dl_comm_device_of_pointer(const void* memory);

/* Returns 0 when the tensors (`src`) hold the same bits on all ranks, else 1, the same on every rank; with `verbose`
 * every rank that differs from rank 0 prints which tensor does. Collective. */
int dl_comm_check_buffers_match(const dl_comm_buffer_t* buffers, size_t count, int verbose);

/* Memory of `bytes` zero bytes, at a multiple of 64 (of 4096 where they are more than 2048, of 2 MiB where they are as
 * many), that all ranks of the host see in each other: an average in place of tensors that lie there, on all ranks,
 * copies nothing on a job of one host. As good as other memory everywhere else. Its address is put into `memory`, NULL
 * on error. dl_comm_free gives it back, after dl_comm_finalize too; NULL is nothing. Not collective. */
int dl_comm_alloc(size_t bytes, void** memory);
int dl_comm_free(void* memory);

/* Returns when every rank has called it. Collective. */
int dl_comm_barrier(void);

/* dl_comm_barrier with a `timeout` as for dl_comm_average_towers. Collective. */
int dl_comm_barrier_timeout(double timeout);

/* Sets how long coming calls on the team may take, in seconds (0: no limit), instead of DL_COMM_TIMEOUT_S; -1 is the
 * team of broadcast and barrier. Local: the ranks need not agree on it. */
int dl_comm_set_timeout(int team, double seconds);

/* Ends the use of dl_comm after a failure: the other ranks get an error soon, which says `why` (UTF-8, one line; NULL
 * for nothing), and MPI is left as it is, so that the launcher ends the job. Not collective. */
int dl_comm_abort(const char* why);

/* Returns 1 when dl_comm_init succeeded and dl_comm_finalize was not called, else 0. */
int dl_comm_is_initialized(void);

/* Sets a function that the main thread calls about ten times a second while it waits in a call; NULL sets none. When it
 * returns a number other than 0, the call ends with DL_COMM_ERROR_PEER_LOST, and so do the calls that wait for it on
 * the other ranks. It must not call functions of this file. For languages that run the handlers of signals at points of
 * their own. */
void dl_comm_set_signal_check(int (*check)(void));

/* dl_comm_init, and the teams from 0 to `nteams` - 1 that do not exist, with `nthreads` threads each (0: as many as
 * DL_COMM_DEFAULT_NTHREADS says). Ranks that ask for different numbers get DL_COMM_ERROR_MISMATCH. Collective. */
int dl_comm_init_teams(int nteams, int nthreads);

/* Returns 1 in a helper of a rank: a process that a rank has forked, or started without a launcher. dl_comm_get_rank,
 * dl_comm_get_nranks, dl_comm_localrank, dl_comm_get_local_nranks and dl_comm_get_nhosts answer there as in the rank;
 * dl_comm_init_mpi, dl_comm_init and dl_comm_finalize do nothing; what communicates is a DL_COMM_ERROR_STATE. Else 0.
 */
int dl_comm_is_helper(void);

/* dl_comm_create_team with the precision of DL_COMM_DEFAULT_PREC_LEVEL, and, when `nthreads_in_team` is 0, the threads
 * of DL_COMM_DEFAULT_NTHREADS, unless the team exists already. Collective when it does not. */
int dl_comm_ensure_team(int teamID, int nthreads_in_team);

/* Returns the number of created teams with an id from 0. */
int dl_comm_get_nteams(void);

/* Forgets what averages of `owner` on the team have left to calls that will not come; owners are numbers that the op
 * libraries of the frameworks give to optimizers. */
int dl_comm_release_owner(int teamID, uint64_t owner);

/* Returns for how many seconds callers of this rank have waited for averages of the team: what the lines of
 * dl_comm_config_team's `verbosity` print. A negative DL_COMM_ERROR_* code when there is no such team. */
double dl_comm_get_waited(int teamID);

/* The functions that give a text write up to `capacity` bytes of it, its terminating NUL included, and return the
 * length that all of it has (without the NUL), as snprintf does. */

/* The numbers of all teams since their start, as a JSON object; docs/diagnosis.md tells what they are. */
int dl_comm_stats(char* text, size_t capacity);

/* Writes the last calls of this rank, and what it waits for, as a JSON file into `folder` (NULL: where DL_COMM_DUMP_DIR
 * says) for `python -m dl_comm.analyze_dumps`; gives the file's path. Not collective. */
int dl_comm_dump(const char* folder, char* path, size_t capacity);

/* For the stacks of an interpreter in dumps ("stacks"): from now on a thread that writes a dump sends itself `signal`,
 * whose handler writes text to the open file `fd`, at its position. Python's faulthandler.register does. Local. */
int dl_comm_stacks_from(int signal, int fd);

/* Records what every thread of dl_comm does in this rank, into a file in `folder`, until dl_comm_timeline_stop or
 * dl_comm_finalize; `python -m dl_comm.timeline` reads the files of all ranks. DL_COMM_TIMELINE does so from the start.
 * Not collective. */
int dl_comm_timeline_start(const char* folder);
int dl_comm_timeline_stop(void);

/* The number of processes on this host. Valid after dl_comm_init_mpi. */
int dl_comm_get_local_nranks(void);

/* The number of hosts. Valid after dl_comm_init_mpi. */
int dl_comm_get_nhosts(void);

/* A number that is the same for all who share one core in this process, and different for a second core. */
uintptr_t dl_comm_core_id(void);

/* The version of the library, "major.minor.patch". */
const char* dl_comm_version(void);

/* Writes what this process can tell of itself into `text`: one JSON object, UTF-8, ended by NUL, cut to `capacity`
 * bytes with the NUL. Returns the length of the whole without the NUL, as snprintf does: ask with (NULL, 0), then with
 * one byte more than that, and again when the answer has grown.
 * - Always: "version", "library" (the file of libdl_comm), "mpi" ("library_version", "standard", "library" (its file),
 *   "initialized", "finalized", "thread_level"), "state" ("not_started", "started", "finalized"), "variables" (the
 *   names of all environment variables), "unknown_variables" (those that are set, begin with DL_COMM_ and are none of
 *   them, each with the nearest name or null), and "settings" (the
 *   DL_COMM_* variables, in their units) or "settings_error".
 * - After dl_comm_init_mpi also "rank", "size", "hosts", "local_rank", "local_size", "ranks" (a list: "rank", "host",
 *   "host_index", "local_rank", "pid", "pid_namespace", "boot_id", "shm_device"), "teams" (a list: "id", "threads",
 *   "prec_level", "slot_bytes", "shards", and "gpu": null, or, after the first call on the memory of a GPU,
 *   "path" ("nccl", "ipc", "ipc+staged", "staged" or "single_rank"), "reason" why it is no better one, "sync" (of the
 * two with "ipc": "stream" or "host", who waits for the other ranks), "gpu", "gpu_name", "gpu_uuid", "mps",
 * "device_bytes" that the team took, "nccl") and, on several hosts, "network" (what was measured between them, in
 * seconds: "latency_s" of a message, "per_message_s" for each further one at once, "per_byte_s"). Names may be added.
 */
int dl_comm_describe(char* text, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* DL_COMM_H */
