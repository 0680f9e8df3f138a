/* Stasis for programs in C, and for languages that call C: checkpoint and restore of CUDA
 * processes.
 *
 * C11 and C++. Link with -lstasis. docs/c-api.md has examples.
 *
 * Errors. A function that can fail returns NULL, or an error that the caller frees with
 * stasis_error_free(). Results come through pointers, which are written on success only, unless
 * it says otherwise. Nothing here prints, exits or aborts.
 *
 * Strings that are passed in are UTF-8 and copied. A string that is returned as `const char *`
 * belongs to the object that returned it and lives as long as that object; the texts about codes
 * live as long as the library. A string that is returned through a `char **` belongs to the
 * caller, which frees it with stasis_free().
 *
 * Options. A struct of options begins with its own size, which its _init() function sets, together
 * with the defaults; it grows at its end, and a program that was compiled with a shorter one goes
 * on working. NULL stands for the defaults.
 *
 * Threads. Different handles may be used at the same time, also of one session; one handle by one
 * thread at a time. stasis_cancel_request() may be called from any thread and from a signal
 * handler.
 *
 * Signals. The library installs no handlers. Handlers of the program should have SA_RESTART.
 *
 * Permissions. The user of a process, or root, may act on it; where kernel.yama.ptrace_scope is not
 * 0, a process that has CAP_SYS_PTRACE. Normally one process acts on another: the calls of a
 * locked process to its own driver wait, also those that would unlock it. docs/python.md shows how
 * a program has a helper suspend it.
 */
#ifndef STASIS_STASIS_H
#define STASIS_STASIS_H

/* C's names and headers. NOLINTBEGIN(readability-identifier-naming,modernize-*) */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define STASIS_API __attribute__((visibility("default")))
#else
#define STASIS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Versions ---------------------------------------------------------------------------------
 */

/* "0.2.0" */
STASIS_API const char* stasis_version(void);

/* ---- Errors -----------------------------------------------------------------------------------
 */

/* The numbers stay; new ones are added at the end. docs/errors.md says what each means. */
typedef enum stasis_code {
  STASIS_OK = 0,
  STASIS_USAGE = 1,
  STASIS_INTERRUPTED = 2,
  STASIS_INTERNAL = 3,
  STASIS_IO = 4,
  STASIS_NO_SPACE = 5,
  STASIS_NO_SUCH_PROCESS = 6,
  STASIS_PROCESS_GONE = 7,
  STASIS_ZOMBIE = 8,
  STASIS_THREAD_ID = 9,
  STASIS_NOT_CUDA = 10,
  STASIS_NOT_PERMITTED = 11,
  STASIS_WRONG_STATE = 12,
  STASIS_FAILED_STATE = 13,
  STASIS_TIMEOUT = 14,
  STASIS_NO_ANSWER = 15,
  STASIS_BUSY = 16,
  STASIS_DRIVER_MISSING = 17,
  STASIS_DRIVER_TOO_OLD = 18,
  STASIS_DRIVER_UNSUPPORTED = 19,
  STASIS_DRIVER_ERROR = 20,
  STASIS_NOT_SUPPORTED = 21,
  STASIS_DEVICE_MAP_UNSUPPORTED = 22,
  STASIS_DEVICE_MAP_INVALID = 23,
  STASIS_GPU_MISMATCH = 24,
  STASIS_OUT_OF_GPU_MEMORY = 25,
  STASIS_OUT_OF_HOST_MEMORY = 26,
  STASIS_CRIU_MISSING = 27,
  STASIS_CRIU_TOO_OLD = 28,
  STASIS_CRIU_FAILED = 29,
  STASIS_UNDUMPABLE = 30,
  STASIS_IMAGE_EXISTS = 31,
  STASIS_IMAGE_INCOMPLETE = 32,
  STASIS_IMAGE_CORRUPT = 33,
  STASIS_IMAGE_VERSION = 34,
  STASIS_PID_IN_USE = 35,
  STASIS_NOT_ROLLED_BACK = 36
} stasis_code;

typedef struct stasis_error stasis_error;

STASIS_API stasis_code stasis_error_code(const stasis_error* error);
/* What happened, with the value seen; no full stop at its end. */
STASIS_API const char* stasis_error_message(const stasis_error* error);
/* What to do about it; "" if there is nothing to say. */
STASIS_API const char* stasis_error_remedy(const stasis_error* error);
/* What the driver itself answered: its CUresult, and the name and text of that. 0 and "" if the
 * error is not the driver's. */
STASIS_API int stasis_error_driver_number(const stasis_error* error);
STASIS_API const char* stasis_error_driver_name(const stasis_error* error);
STASIS_API const char* stasis_error_driver_text(const stasis_error* error);
/* JSON, as `stasis --json` prints it; its "error" has "obstacles" where the driver, an agent or
 * CRIU would refuse or lose something: [{"id", "pid", "what", "remedy", "override"}, ...]. Free it
 * with stasis_free(). NULL without memory. */
STASIS_API char* stasis_error_json(const stasis_error* error);
/* NULL is fine. */
STASIS_API void stasis_error_free(stasis_error* error);

/* For a code: its name in `--json` ("wrong-state"), its meaning, and the exit status of `stasis`.
 * "" and 0 for STASIS_OK, NULL and 1 for what is no code. */
STASIS_API const char* stasis_code_name(stasis_code code);
STASIS_API const char* stasis_code_meaning(stasis_code code);
STASIS_API int stasis_code_exit_status(stasis_code code);

/* Frees a string that is the caller's. NULL is fine. */
STASIS_API void stasis_free(char* text);

/* ---- Stopping ---------------------------------------------------------------------------------
 */

/* One request to stop. A call that was given one ends soon after stasis_cancel_request(), with
 * STASIS_INTERRUPTED and everything rolled back, unless finishing was the shorter way: then it
 * succeeds. Used by one call at a time; a request stays. */
typedef struct stasis_cancel stasis_cancel;

/* NULL if there is no memory. */
STASIS_API stasis_cancel* stasis_cancel_new(void);
/* May be called from any thread and any signal handler. */
STASIS_API void stasis_cancel_request(stasis_cancel* cancel);
STASIS_API void stasis_cancel_free(stasis_cancel* cancel);

/* What a caller may give to a call besides its options. NULL: nothing.
 *
 * The library calls `progress` with the bytes of a long step: at most some twenty times a second,
 * from the caller's thread or another, never from two at once. `total` is 0 where it is unknown
 * (the "write" of a dump). It calls `note` with what is worth knowing and no error. The job stands
 * still meanwhile: both must return at once, and must not throw. */
typedef struct stasis_call {
  size_t size;
  stasis_cancel* cancel;
  void (*progress)(const char* phase, uint64_t done, uint64_t total, void* user_data);
  void (*note)(const char* text, void* user_data);
  void* user_data;
} stasis_call;
STASIS_API void stasis_call_init(stasis_call* call, size_t size);

/* ---- Sessions ---------------------------------------------------------------------------------
 */

/* A driver that was loaded. Several threads may use it at once. A forked child cannot use it, and
 * has to open its own. */
typedef struct stasis_session stasis_session;

typedef struct stasis_session_options {
  size_t size;
  /* The driver's library; NULL: STASIS_LIBCUDA, else libcuda.so.1. */
  const char* library;
  /* How long the driver may be silent in a call, in milliseconds; a checkpoint or a restore is
   * silent while it shows no sign of work. 0: for ever, and the library makes the calls in this
   * process, which a restore then makes a CUDA process. Otherwise it makes them in processes of
   * their own. [10000 and 60000] */
  uint32_t answer_timeout_ms;
  uint32_t work_timeout_ms;
} stasis_session_options;
STASIS_API void stasis_session_options_init(stasis_session_options* options, size_t size);

/* STASIS_DRIVER_MISSING, STASIS_DRIVER_TOO_OLD, STASIS_DRIVER_UNSUPPORTED. */
STASIS_API stasis_error* stasis_session_open(const stasis_session_options* options,
                                             stasis_session** session);
/* Handles that were opened with it go on working. NULL is fine. */
STASIS_API void stasis_session_close(stasis_session* session);

/* "580.159.04", "" if it is unknown. */
STASIS_API const char* stasis_session_driver_version(const stasis_session* session);
/* 13000 for driver 580. */
STASIS_API int stasis_session_cuda_version(const stasis_session* session);
/* Whether it is the project's simulated driver, without a GPU. */
STASIS_API bool stasis_session_is_simulated(const stasis_session* session);

/* ---- One process: the driver's own six calls --------------------------------------------------
 */

typedef enum stasis_state {
  STASIS_RUNNING = 0,
  STASIS_LOCKED = 1,
  STASIS_CHECKPOINTED = 2,
  STASIS_FAILED = 3
} stasis_state;
/* "running", "locked", "checkpointed", "failed"; NULL for no state. */
STASIS_API const char* stasis_state_name(stasis_state state);

/* What was on `from` goes to `to`: each a UUID ("GPU-..."), an index, or a PCI address. GPUs that
 * no pair names stay where they are if they can. */
typedef struct stasis_gpu_pair {
  const char* from;
  const char* to;
} stasis_gpu_pair;

/* A process, held by more than its number: the handle never comes to mean a later process with that
 * number. */
typedef struct stasis_process stasis_process;

/* STASIS_NO_SUCH_PROCESS, STASIS_THREAD_ID, STASIS_ZOMBIE, STASIS_NOT_PERMITTED; says nothing about
 * CUDA. */
STASIS_API stasis_error* stasis_process_open(stasis_session* session, int pid,
                                             stasis_process** process);
/* Changes nothing in the process: a locked process stays locked. NULL is fine. */
STASIS_API void stasis_process_close(stasis_process* process);
STASIS_API int stasis_process_pid(const stasis_process* process);

/* All below: STASIS_NOT_CUDA, STASIS_PROCESS_GONE, STASIS_BUSY (stopped or traced),
 * STASIS_WRONG_STATE, STASIS_NOT_PERMITTED, STASIS_NO_ANSWER, and what the driver refuses. */
STASIS_API stasis_error* stasis_process_state(stasis_process* process, stasis_state* state);
STASIS_API stasis_error* stasis_process_restore_thread_id(stasis_process* process, int* thread_id);
/* running -> locked: waits for submitted GPU work. 0 waits for ever. STASIS_TIMEOUT and
 * STASIS_INTERRUPTED leave it running. */
STASIS_API stasis_error* stasis_process_lock(stasis_process* process, uint32_t timeout_ms,
                                             const stasis_call* call);
/* locked -> checkpointed: its GPU memory is in its own host memory. Cannot be interrupted. */
STASIS_API stasis_error* stasis_process_checkpoint(stasis_process* process);
/* checkpointed -> locked. Cannot be interrupted. */
STASIS_API stasis_error* stasis_process_restore(stasis_process* process,
                                                const stasis_gpu_pair* pairs, size_t count);
/* locked -> running. */
STASIS_API stasis_error* stasis_process_unlock(stasis_process* process);
/* Brings the process to running, locked or checkpointed by as many of these calls as it takes. The
 * time is for a lock. */
STASIS_API stasis_error* stasis_process_bring_to(stasis_process* process, stasis_state wanted,
                                                 uint32_t timeout_ms);

/* ---- A process and all below it, as one -------------------------------------------------------
 */

/* The CUDA processes of a tree, locked at the same time because they may wait for each other on the
 * GPU. Those without CUDA are left alone. */
typedef struct stasis_group stasis_group;

STASIS_API stasis_error* stasis_group_open(stasis_session* session, int root_pid,
                                           stasis_group** group);
/* Changes nothing in the processes. NULL is fine. */
STASIS_API void stasis_group_close(stasis_group* group);
/* JSON: [{"pid", "command", "cuda", "state"}, ...], the root first, states asked anew. */
STASIS_API stasis_error* stasis_group_members(stasis_group* group, char** json);
/* Locks all of them or none. STASIS_TIMEOUT and STASIS_INTERRUPTED leave them as they were. */
STASIS_API stasis_error* stasis_group_lock(stasis_group* group, uint32_t timeout_ms,
                                           const stasis_call* call);
/* Their threads are kept still until the unlock. On an error they are locked again, or it is
 * STASIS_NOT_ROLLED_BACK. */
STASIS_API stasis_error* stasis_group_checkpoint(stasis_group* group, const stasis_call* call);
STASIS_API stasis_error* stasis_group_restore(stasis_group* group, const stasis_gpu_pair* pairs,
                                              size_t count, const stasis_call* call);
STASIS_API stasis_error* stasis_group_unlock(stasis_group* group);

/* ---- Whole procedures -------------------------------------------------------------------------
 */

/* Each acts on the tree below a process, checks first, writes down what it does so that `stasis
 * recover` can undo it, and rolls back on every error. `report` may be NULL; it gets the JSON that
 * the verb of `stasis` prints with --json. `call` and `options` may be NULL where the text does not
 * say otherwise. */

typedef struct stasis_suspend_options {
  size_t size;
  uint32_t timeout_ms;   /* for GPU work in flight; 0: for ever [10000] */
  bool ignore_obstacles; /* go on although the driver may refuse or lose the memory [false] */
  /* Bring the agent first to programs that run without it, as `stasis attach` does; if it cannot
   * be, that is the error, and they run on [false] */
  bool attach;
  /* With it one of these, or it is refused: they use no CUDA graphs, or none with a copy from or to
   * the host in it [false]; or how long to watch them for graphs, a time in which they would launch
   * each of theirs; 0: not given [0] */
  bool graphs_are_safe;
  uint32_t watch_ms;
} stasis_suspend_options;
STASIS_API void stasis_suspend_options_init(stasis_suspend_options* options, size_t size);
/* Locks and checkpoints: its GPU memory is free. */
STASIS_API stasis_error* stasis_suspend(stasis_session* session, int pid,
                                        const stasis_suspend_options* options,
                                        const stasis_call* call, char** report);

typedef struct stasis_resume_options {
  size_t size;
  const stasis_gpu_pair* gpu_pairs; /* in part or whole [none: where it was] */
  size_t gpu_pair_count;
  uint32_t time_limit_ms; /* after which it is left suspended; 0: none [0] */
  /* The image that holds the content of its GPU memory, if that was moved or the state directory
   * was lost [none: where it was] */
  const char* images_dir;
} stasis_resume_options;
STASIS_API void stasis_resume_options_init(stasis_resume_options* options, size_t size);
/* Restores and unlocks: it runs. */
STASIS_API stasis_error* stasis_resume(stasis_session* session, int pid,
                                       const stasis_resume_options* options,
                                       const stasis_call* call, char** report);

typedef struct stasis_swap_options {
  size_t size;
  uint32_t timeout_ms;   /* for GPU work of the first in flight; 0: for ever [10000] */
  bool ignore_obstacles; /* go on although the driver may refuse or lose the memory [false] */
  const stasis_gpu_pair* gpu_pairs; /* of the second, in part or whole [none: where it was] */
  size_t gpu_pair_count;
  bool attach; /* to the first, as in stasis_suspend_options [false, false, 0] */
  bool graphs_are_safe;
  uint32_t watch_ms;
} stasis_swap_options;
STASIS_API void stasis_swap_options_init(stasis_swap_options* options, size_t size);
/* Suspends the tree below `out_pid` and resumes that below `in_pid`, at once where both fit on the
 * GPUs. Each side is done by a process of its own; for a job of `stasis run --images-dir` that
 * process enters the job's namespaces, and the number is that outside of them. On an error both are
 * as they were, or it is STASIS_NOT_ROLLED_BACK. STASIS_WRONG_STATE unless the first runs and the
 * second is suspended. The call starts processes: no other thread should do so meanwhile. */
STASIS_API stasis_error* stasis_swap(stasis_session* session, int out_pid, int in_pid,
                                     const stasis_swap_options* options, const stasis_call* call,
                                     char** report);

typedef enum stasis_after_dump {
  STASIS_AFTER_DUMP_END = 0,
  STASIS_AFTER_DUMP_RUNNING = 1,
  STASIS_AFTER_DUMP_SUSPENDED = 2
} stasis_after_dump;

typedef struct stasis_dump_options {
  size_t size;
  const char* images_dir;  /* must be set */
  stasis_after_dump after; /* [STASIS_AFTER_DUMP_END] */
  uint32_t timeout_ms;     /* for GPU work in flight; 0: for ever [10000] */
  bool overwrite;          /* replace an image that is there [false] */
  bool sync;               /* end nothing before the image would survive a loss of power [true] */
  bool ignore_obstacles;   /* go on although the driver may refuse or lose the memory, and CRIU what
                              it is known not to dump [false] */
  bool ignore_undumpable;  /* of that the half about CRIU: its older name [false] */
  const char* criu;        /* the program [STASIS_CRIU, PATH, /opt/stasis/criu] */
  /* CRIU's own, by CRIU's names. */
  bool shell_job;
  bool tcp_established;
  bool tcp_close;
  bool file_locks;
  bool link_remap; /* [true] */
  bool ext_unix_sk;
  uint32_t ghost_limit;        /* bytes [256 MiB] */
  const char* manage_cgroups;  /* "ignore", "none", "props", "soft", "full", "strict" ["ignore"] */
  const char* network_lock;    /* "iptables", "nftables", "skip" ["nftables"] */
  const char* const* external; /* "mnt[/data]:data" */
  size_t external_count;
  /* "none", "lz4", "zstd": for GPU memory that goes by the direct path ["none"] */
  const char* compress;
  /* An earlier image of the same job, on the same file system: GPU memory that goes by the direct
   * path and is there already is not written again, but shared by hard links. If it cannot serve,
   * `note` says so, and all is written [none] */
  const char* base;
  bool attach; /* as in stasis_suspend_options [false, false, 0] */
  bool graphs_are_safe;
  uint32_t watch_ms;
} stasis_dump_options;
STASIS_API void stasis_dump_options_init(stasis_dump_options* options, size_t size);
/* Saves it to disk and ends it, or lets it go on. `options` must be given. */
STASIS_API stasis_error* stasis_dump(stasis_session* session, int pid,
                                     const stasis_dump_options* options, const stasis_call* call,
                                     char** report);

/* `fd` of this process takes the place of `key` ("pipe:[1234]"). */
typedef struct stasis_inherited_fd {
  int fd;
  const char* key;
} stasis_inherited_fd;

typedef struct stasis_restore_options {
  size_t size;
  const char* images_dir; /* must be set */
  const stasis_gpu_pair* gpu_pairs;
  size_t gpu_pair_count;
  bool leave_suspended;   /* stasis_resume() brings its GPU state back [false] */
  uint32_t time_limit_ms; /* after which it is given up; 0: none [0] */
  const char* criu;
  const stasis_inherited_fd* inherit;
  size_t inherit_count;
  const char* const* external; /* where it is now: "mnt[data]:/data" */
  size_t external_count;
  bool tcp_close;
  bool ext_unix_sk;
  const char* manage_cgroups;       /* [as at the dump] */
  const char* const* map_addresses; /* "OLD=NEW": other addresses for its sockets */
  size_t map_address_count;
} stasis_restore_options;
STASIS_API void stasis_restore_options_init(stasis_restore_options* options, size_t size);
/* Brings it back. Its root becomes a child of this process: waitpid() collects it. SIGCHLD must not
 * be ignored. `options` must be given. Of a directory with numbered images (000001, 000002) it
 * takes the newest. The image of a job of `stasis run --images-dir` is refused: that program alone
 * goes on with it, and the remedy has its command line. */
STASIS_API stasis_error* stasis_restore(stasis_session* session,
                                        const stasis_restore_options* options,
                                        const stasis_call* call, char** report);

/* Makes every CUDA process below `pid` run, whatever has left it locked or suspended; pid 0: the
 * targets of every operation that was killed. The report says of each whether it worked; if one did
 * not, it is written too, and the error is STASIS_NOT_ROLLED_BACK. */
STASIS_API stasis_error* stasis_recover(stasis_session* session, int pid, const stasis_call* call,
                                        char** report);

/* ---- Jobs by their names ------------------------------------------------------------------------
 *
 * The same for a job by its name (`stasis run --name`), or a process by its number as text, as the
 * command `stasis` takes them. A job of `stasis run --images-dir` lives in namespaces of its own:
 * the library does the work there, in a process that it starts, which needs the rights that
 * `stasis` needs for it; process numbers in the report are those in there. STASIS_NO_SUCH_PROCESS:
 * no job has the name. STASIS_BUSY: it is being started or restored. The calls start processes: no
 * other thread should do so meanwhile. A job is started by the program: `stasis run --name NAME --
 * COMMAND`. */
STASIS_API stasis_error* stasis_suspend_job(stasis_session* session, const char* name,
                                            const stasis_suspend_options* options,
                                            const stasis_call* call, char** report);
STASIS_API stasis_error* stasis_resume_job(stasis_session* session, const char* name,
                                           const stasis_resume_options* options,
                                           const stasis_call* call, char** report);
/* `options` must be given. */
STASIS_API stasis_error* stasis_dump_job(stasis_session* session, const char* name,
                                         const stasis_dump_options* options,
                                         const stasis_call* call, char** report);
STASIS_API stasis_error* stasis_swap_jobs(stasis_session* session, const char* out_name,
                                          const char* in_name, const stasis_swap_options* options,
                                          const stasis_call* call, char** report);
STASIS_API stasis_error* stasis_recover_job(stasis_session* session, const char* name,
                                            const stasis_call* call, char** report);

typedef struct stasis_inspect_options {
  size_t size;
  const char* images_dir; /* must be set */
  bool verify;            /* read every byte [false] */
  const stasis_gpu_pair* gpu_pairs;
  size_t gpu_pair_count;
  const char* criu;
} stasis_inspect_options;
STASIS_API void stasis_inspect_options_init(stasis_inspect_options* options, size_t size);
/* What is in an image, and whether it can be restored on this machine. `session` may be NULL, where
 * there is no driver. Of a job's directory it takes the newest image. An image that cannot be
 * restored is no error: see "restorable" and "checks". */
STASIS_API stasis_error* stasis_inspect(stasis_session* session,
                                        const stasis_inspect_options* options,
                                        const stasis_call* call, char** report);

#ifdef __cplusplus
}
#endif
/* NOLINTEND(readability-identifier-naming,modernize-*) */

#endif
