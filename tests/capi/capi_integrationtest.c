/* The C interface, used from C: every function once, on a real process on the simulated driver, with
 * the real CRIU. Prints TAP. STASIS_BUILD is the build folder; the driver is STASIS_LIBCUDA's.
 * Long because each function of the interface is called once, on the same process. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "stasis/stasis.h"

static int count, failed, wrong;
static char folder[256];
static stasis_session *session;

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      printf("# %s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);    \
      ++wrong;                                                                  \
    }                                                                           \
  } while (0)

static void ok(const char *name) {
  printf("%sok %d %s\n", wrong ? "not " : "", ++count, name);
  fflush(stdout);
  failed += wrong != 0;
  wrong = 0;
}

static void nap(long ms) {
  struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
  while (nanosleep(&time, &time) != 0) {
  }
}

/* The code, with the text told if it is not the one expected. */
static stasis_code code_of(stasis_error *error, stasis_code expected) {
  const stasis_code code = stasis_error_code(error);
  if (code != expected) {
    printf("# %s [%s], expected [%s]; %s\n", stasis_error_message(error), stasis_code_name(code),
           stasis_code_name(expected), stasis_error_remedy(error));
  }
  stasis_error_free(error);
  return code;
}
#define EXPECT(call, code) CHECK(code_of((call), (code)) == (code))
#define GOOD(call) EXPECT(call, STASIS_OK)

static long round_of(const char *status) {
  char text[64] = {0};
  FILE *file = fopen(status, "r");
  if (file == NULL) return 0;
  const size_t got = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  return got > 6 ? strtol(text + 6, NULL, 10) : 0;
}

static void status_path(char *to, size_t size, const char *name) {
  snprintf(to, size, "%s/%s.status", folder, name);
}

static bool goes_on(const char *name) {
  char status[300];
  status_path(status, sizeof status, name);
  const long before = round_of(status);
  for (int i = 0; i < 12000; ++i) {
    if (round_of(status) > before + 1) return true;
    nap(5);
  }
  return false;
}

/* Starts `kind` of workload, behind the words in front of it. */
static pid_t start_behind(const char *const *words, const char *name, const char *kind,
                          const char *option, const char *value) {
  char program[400], library[400], status[300], log[300];
  const char *build = getenv("STASIS_BUILD");
  snprintf(program, sizeof program, "%s/bin/stasis-workload", build);
  snprintf(library, sizeof library, "%s/lib/stasis/sim", build);
  setenv("LD_LIBRARY_PATH", library, 1);
  status_path(status, sizeof status, name);
  snprintf(log, sizeof log, "%s/%s.log", folder, name);
  const char *argv[16] = {NULL};
  size_t at = 0;
  while (words[at] != NULL) {
    argv[at] = words[at];
    ++at;
  }
  const char *command[] = {program, kind, option, value, "--status", status};
  memcpy(argv + at, command, sizeof command);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, log, O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  pid_t pid = -1;
  if (posix_spawn(&pid, argv[0], &files, &attributes, (char *const *)argv, environ) != 0) pid = -1;
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return pid;
}

static pid_t start(const char *name, const char *kind, const char *option, const char *value) {
  const char *const none[] = {NULL};
  return start_behind(none, name, kind, option, value);
}

/* By `stasis run`, with that name; with `images`, in namespaces of its own. */
static pid_t start_job(const char *name, const char *images) {
  char stasis[400];
  snprintf(stasis, sizeof stasis, "%s/bin/stasis", getenv("STASIS_BUILD"));
  const char *const plain[] = {stasis, "run", "--name", name, "--", NULL};
  const char *const saved[] = {stasis, "run", "--name", name, "--images-dir", images, "--", NULL};
  return start_behind(images == NULL ? plain : saved, name, "memory", "--size", "8M");
}

static int end(pid_t pid) {
  int status = -1;
  kill(pid, SIGTERM);
  waitpid(pid, &status, 0);
  return status;
}

static void test_codes(void) {
  CHECK(strcmp(stasis_version(), "") != 0);
  CHECK(strcmp(stasis_code_name(STASIS_WRONG_STATE), "wrong-state") == 0);
  CHECK(strlen(stasis_code_meaning(STASIS_NOT_ROLLED_BACK)) > 10);
  CHECK(stasis_code_exit_status(STASIS_NOT_ROLLED_BACK) == 12);
  CHECK(strcmp(stasis_code_name(STASIS_OK), "") == 0);
  CHECK(stasis_code_name((stasis_code)(STASIS_NOT_ROLLED_BACK + 1)) == NULL);
  CHECK(stasis_code_name((stasis_code)-1) == NULL);
  for (int code = STASIS_USAGE; code <= STASIS_NOT_ROLLED_BACK; ++code)
    CHECK(stasis_code_name((stasis_code)code) != NULL);
  CHECK(strcmp(stasis_state_name(STASIS_FAILED), "failed") == 0);
  CHECK(stasis_state_name((stasis_state)9) == NULL);
  CHECK(stasis_error_code(NULL) == STASIS_OK);
  CHECK(strcmp(stasis_error_message(NULL), "") == 0);
  stasis_error_free(NULL);
  stasis_free(NULL);
  stasis_session_close(NULL);
  stasis_process_close(NULL);
  stasis_group_close(NULL);
  stasis_cancel_request(NULL);
  stasis_cancel_free(NULL);
  ok("codes, states, and nothing where nothing is given");
}

static void test_options(void) {
  stasis_dump_options dump;
  memset(&dump, 0xff, sizeof dump);
  stasis_dump_options_init(&dump, sizeof dump);
  CHECK(dump.size == sizeof dump && dump.timeout_ms == 10000 && dump.sync && dump.link_remap);
  CHECK(dump.images_dir == NULL && dump.ghost_limit == 256U << 20);
  EXPECT(stasis_dump(session, getpid(), &dump, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_dump(session, getpid(), NULL, NULL, NULL), STASIS_USAGE);
  dump.images_dir = folder;
  dump.manage_cgroups = "some";
  EXPECT(stasis_dump(session, getpid(), &dump, NULL, NULL), STASIS_USAGE);
  dump.manage_cgroups = NULL;
  dump.external_count = 1;
  EXPECT(stasis_dump(session, getpid(), &dump, NULL, NULL), STASIS_USAGE);

  stasis_restore_options restore;
  const char* const pair = "10.0.0.1";
  stasis_restore_options_init(&restore, sizeof restore);
  restore.images_dir = folder;
  restore.map_addresses = &pair;
  restore.map_address_count = 1;
  EXPECT(stasis_restore(session, &restore, NULL, NULL), STASIS_USAGE);

  stasis_suspend_options suspend = {0};
  EXPECT(stasis_suspend(session, getpid(), &suspend, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_suspend(NULL, getpid(), NULL, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_suspend(session, 0, NULL, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_suspend(session, -5, NULL, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_process_open(session, getpid(), NULL), STASIS_USAGE);
  EXPECT(stasis_process_lock(NULL, 0, NULL), STASIS_USAGE);

  /* Compiled with an older header: the members that there were are taken, the others are default. */
  struct {
    size_t size;
    uint32_t timeout_ms;
  } older;
  stasis_suspend_options_init((stasis_suspend_options *)(void *)&older, sizeof older);
  CHECK(older.size == sizeof older && older.timeout_ms == 10000);
  EXPECT(stasis_suspend(session, getpid(), (stasis_suspend_options *)(void *)&older, NULL, NULL),
         STASIS_NOT_CUDA);
  /* With a newer one: fine as long as what this library does not know is not set. */
  struct {
    stasis_suspend_options known;
    uint64_t unknown;
  } newer;
  stasis_suspend_options_init(&newer.known, sizeof newer);
  CHECK(newer.known.size == sizeof newer && newer.unknown == 0);
  EXPECT(stasis_suspend(session, getpid(), &newer.known, NULL, NULL), STASIS_NOT_CUDA);
  newer.unknown = 1;
  EXPECT(stasis_suspend(session, getpid(), &newer.known, NULL, NULL), STASIS_USAGE);
  ok("options: defaults, misuse, shorter and longer ones");
}

static void test_session(void) {
  stasis_session_options options;
  stasis_session_options_init(&options, sizeof options);
  CHECK(options.answer_timeout_ms == 10000 && options.work_timeout_ms == 60000);
  options.library = "/nowhere/libcuda.so.1";
  stasis_session *none = (stasis_session *)1;
  EXPECT(stasis_session_open(&options, &none), STASIS_DRIVER_MISSING);
  CHECK(none == (stasis_session *)1);
  GOOD(stasis_session_open(NULL, &session));
  CHECK(stasis_session_is_simulated(session));
  CHECK(stasis_session_cuda_version(session) == 13000);
  CHECK(strlen(stasis_session_driver_version(session)) > 0);
  ok("a session");
}

static void test_process(void) {
  const pid_t pid = start("process", "memory", "--size", "4M");
  CHECK(goes_on("process"));
  stasis_process *process = NULL;
  GOOD(stasis_process_open(session, pid, &process));
  CHECK(stasis_process_pid(process) == pid);
  stasis_state state = STASIS_FAILED;
  int thread = 0;
  GOOD(stasis_process_state(process, &state));
  CHECK(state == STASIS_RUNNING);
  GOOD(stasis_process_restore_thread_id(process, &thread));
  CHECK(thread > 0 && thread != pid);
  stasis_error *error = stasis_process_unlock(process);
  CHECK(stasis_error_code(error) == STASIS_WRONG_STATE);
  CHECK(strlen(stasis_error_message(error)) > 10 && strlen(stasis_error_remedy(error)) > 10);
  CHECK(stasis_error_driver_number(error) == 401);
  CHECK(strcmp(stasis_error_driver_name(error), "CUDA_ERROR_ILLEGAL_STATE") == 0);
  CHECK(strlen(stasis_error_driver_text(error)) > 0);
  stasis_error_free(error);
  GOOD(stasis_process_lock(process, 5000, NULL));
  GOOD(stasis_process_checkpoint(process));
  GOOD(stasis_process_state(process, &state));
  CHECK(state == STASIS_CHECKPOINTED);
  stasis_gpu_pair pair = {"GPU-00000000-0000-0000-0000-000000000000", "0"};
  EXPECT(stasis_process_restore(process, &pair, 1), STASIS_DEVICE_MAP_INVALID);
  pair.from = "0";
  pair.to = "1";
  GOOD(stasis_process_restore(process, &pair, 1));
  GOOD(stasis_process_unlock(process));
  CHECK(goes_on("process"));
  /* It stays as it is when the handle is gone; and handles outlive the session. */
  GOOD(stasis_process_lock(process, 0, NULL));
  stasis_process_close(process);
  stasis_session *other = NULL;
  GOOD(stasis_session_open(NULL, &other));
  GOOD(stasis_process_open(other, pid, &process));
  stasis_session_close(other);
  GOOD(stasis_process_state(process, &state));
  CHECK(state == STASIS_LOCKED);
  GOOD(stasis_process_bring_to(process, STASIS_CHECKPOINTED, 0));
  GOOD(stasis_process_bring_to(process, STASIS_RUNNING, 0));
  EXPECT(stasis_process_bring_to(process, STASIS_FAILED, 0), STASIS_USAGE);
  CHECK(goes_on("process"));
  CHECK(end(pid) == 0);
  EXPECT(stasis_process_state(process, &state), STASIS_PROCESS_GONE);
  stasis_process_close(process);
  EXPECT(stasis_process_open(session, 4194303, &process), STASIS_NO_SUCH_PROCESS);
  ok("a process: the six calls");
}

static stasis_cancel *cancel;
static void on_alarm(int number) {
  (void)number;
  stasis_cancel_request(cancel);
}
static void *request_soon(void *unused) {
  nap(300);
  stasis_cancel_request(cancel);
  return unused;
}

static void test_cancel(void) {
  const pid_t pid = start("cancel", "spin", "--busy-ms", "60000");
  stasis_process *process = NULL;
  stasis_state state = STASIS_FAILED;
  /* Who has seen a round knows that a long kernel has begun. */
  char status[300];
  status_path(status, sizeof status, "cancel");
  for (int i = 0; i < 6000 && round_of(status) < 1; ++i)
    nap(10);
  for (int i = 0; i < 6000 && state != STASIS_RUNNING; ++i, nap(10)) {
    if (process == NULL) stasis_error_free(stasis_process_open(session, pid, &process));
    if (process != NULL) stasis_error_free(stasis_process_state(process, &state));
  }
  stasis_call call;
  stasis_call_init(&call, sizeof call);

  /* From a signal handler, in the thread that waits. */
  struct sigaction action = {0};
  action.sa_handler = on_alarm;
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, NULL);
  call.cancel = cancel = stasis_cancel_new();
  struct timespec before, after;
  clock_gettime(CLOCK_MONOTONIC, &before);
  alarm(1);
  EXPECT(stasis_process_lock(process, 0, &call), STASIS_INTERRUPTED);
  clock_gettime(CLOCK_MONOTONIC, &after);
  CHECK(after.tv_sec - before.tv_sec <= 30);
  GOOD(stasis_process_state(process, &state));
  CHECK(state == STASIS_RUNNING);
  /* What is requested stays so. */
  EXPECT(stasis_process_lock(process, 0, &call), STASIS_INTERRUPTED);
  stasis_cancel_free(cancel);

  /* From another thread. */
  call.cancel = cancel = stasis_cancel_new();
  pthread_t thread;
  pthread_create(&thread, NULL, request_soon, NULL);
  EXPECT(stasis_suspend(session, pid, NULL, &call, NULL), STASIS_INTERRUPTED);
  pthread_join(thread, NULL);
  stasis_cancel_free(cancel);
  GOOD(stasis_process_state(process, &state));
  CHECK(state == STASIS_RUNNING);
  stasis_process_close(process);
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
  ok("a call is stopped by a signal handler, and by another thread");
}

struct told {
  uint64_t most;
  int notes;
};
static void on_progress(const char *phase, uint64_t done, uint64_t total, void *user_data) {
  struct told *told = user_data;
  if (strlen(phase) > 0 && total > 0 && done > told->most) told->most = done;
}
static void on_note(const char *text, void *user_data) {
  ((struct told *)user_data)->notes += strlen(text) > 0;
}

/* The rest of a test dumps, by CRIU. */
static int skip_without_root(const char *test) {
  char text[200];
  if (geteuid() == 0) return 0;
  snprintf(text, sizeof text, "%s # SKIP needs root: CRIU", test);
  ok(text);
  return 1;
}

static void test_operations(void) {
  /* Of a folder with numbered images the newest is meant. */
  char images[300], image[320];
  snprintf(images, sizeof images, "%s/numbered", folder);
  snprintf(image, sizeof image, "%s/000002", images);
  const pid_t pid = start("operations", "memory", "--size", "8M");
  CHECK(goes_on("operations"));
  struct told told = {0, 0};
  stasis_call call;
  stasis_call_init(&call, sizeof call);
  call.progress = on_progress;
  call.note = on_note;
  call.user_data = &told;
  char *report = NULL;

  GOOD(stasis_suspend(session, pid, NULL, &call, &report));
  CHECK(report != NULL && strstr(report, "\"checkpointed\"") != NULL && report[0] == '{');
  stasis_free(report);
  stasis_resume_options resume;
  stasis_resume_options_init(&resume, sizeof resume);
  const stasis_gpu_pair pair = {"0", "1"};
  resume.gpu_pairs = &pair;
  resume.gpu_pair_count = 1;
  GOOD(stasis_resume(session, pid, &resume, NULL, NULL));
  CHECK(goes_on("operations"));
  if (skip_without_root("dump, inspect, restore")) {
    CHECK(end(pid) == 0);
    return;
  }

  stasis_dump_options dump;
  stasis_dump_options_init(&dump, sizeof dump);
  dump.images_dir = image;
  CHECK(mkdir(images, 0700) == 0);
  report = NULL;
  GOOD(stasis_dump(session, pid, &dump, &call, &report));
  CHECK(report != NULL && strstr(report, image) != NULL);
  stasis_free(report);
  CHECK(told.most > 8U << 20);
  CHECK(waitpid(pid, NULL, 0) == pid);

  stasis_inspect_options inspect;
  stasis_inspect_options_init(&inspect, sizeof inspect);
  inspect.images_dir = images;
  inspect.verify = true;
  report = NULL;
  GOOD(stasis_inspect(session, &inspect, NULL, &report));
  CHECK(report != NULL && strstr(report, "\"restorable\": true") != NULL);
  CHECK(strstr(report, image) != NULL);
  stasis_free(report);
  GOOD(stasis_inspect(NULL, &inspect, NULL, &report));
  CHECK(strstr(report, "\"restorable\": false") != NULL);
  stasis_free(report);

  stasis_restore_options restore;
  stasis_restore_options_init(&restore, sizeof restore);
  restore.images_dir = images;
  report = NULL;
  GOOD(stasis_restore(session, &restore, &call, &report));
  CHECK(report != NULL && strstr(report, "\"running\"") != NULL);
  stasis_free(report);
  CHECK(goes_on("operations"));
  EXPECT(stasis_restore(session, &restore, NULL, NULL), STASIS_PID_IN_USE);

  stasis_process *process = NULL;
  stasis_state state = STASIS_FAILED;
  GOOD(stasis_process_open(session, pid, &process));
  GOOD(stasis_process_lock(process, 0, NULL));
  GOOD(stasis_recover(session, pid, NULL, &report));
  stasis_free(report);
  GOOD(stasis_process_state(process, &state));
  CHECK(state == STASIS_RUNNING);
  stasis_process_close(process);
  GOOD(stasis_recover(session, 0, NULL, NULL));
  CHECK(end(pid) == 0); /* it is a child of ours, restored as it is */
  ok("suspend, resume, dump, inspect, restore, recover");
}

/* Of a program under the agent: an image beside an earlier one, and one that was moved. */
static void test_swap(void) {
  const pid_t first = start("swap_first", "memory", "--size", "8M");
  const pid_t second = start("swap_second", "memory", "--size", "8M");
  CHECK(goes_on("swap_first") && goes_on("swap_second"));
  stasis_swap_options options;
  stasis_swap_options_init(&options, sizeof options);
  CHECK(options.timeout_ms == 10000 && !options.ignore_obstacles && options.gpu_pair_count == 0);
  EXPECT(stasis_swap(session, first, 0, &options, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_swap(session, first, second, &options, NULL, NULL), STASIS_WRONG_STATE);
  GOOD(stasis_suspend(session, second, NULL, NULL, NULL));
  EXPECT(stasis_swap(session, getpid(), second, NULL, NULL, NULL), STASIS_USAGE);
  stasis_call call;
  stasis_call_init(&call, sizeof call);
  call.cancel = stasis_cancel_new();
  stasis_cancel_request(call.cancel);
  EXPECT(stasis_swap(session, first, second, NULL, &call, NULL), STASIS_INTERRUPTED);
  stasis_cancel_free(call.cancel);
  CHECK(goes_on("swap_first"));
  char *report = NULL;
  GOOD(stasis_swap(session, first, second, NULL, NULL, &report));
  CHECK(report != NULL && strstr(report, "\"at_once\"") != NULL);
  stasis_free(report);
  CHECK(goes_on("swap_second"));
  const stasis_gpu_pair pair = {"0", "1"};
  options.gpu_pairs = &pair;
  options.gpu_pair_count = 1;
  GOOD(stasis_swap(session, second, first, &options, NULL, NULL));
  CHECK(goes_on("swap_first"));
  GOOD(stasis_resume(session, second, NULL, NULL, NULL));
  CHECK(end(first) == 0 && end(second) == 0);
  ok("swap: there, and back on another GPU");
}

static bool has(const char *report, const char *text) {
  return report != NULL && strstr(report, text) != NULL;
}

/* The agent is brought first, to a program that was not started with it. */
static void test_attach(void) {
  const pid_t pid = start("attach", "memory", "--size", "64M");
  CHECK(goes_on("attach"));
  stasis_suspend_options options;
  stasis_suspend_options_init(&options, sizeof options);
  CHECK(!options.attach && !options.graphs_are_safe && options.watch_ms == 0);
  options.attach = true;
  char *report = NULL;
  /* Neither of the two is given. */
  EXPECT(stasis_suspend(session, pid, &options, NULL, NULL), STASIS_NOT_SUPPORTED);
  CHECK(goes_on("attach"));
  options.watch_ms = 1;
  options.graphs_are_safe = true;
  GOOD(stasis_suspend(session, pid, &options, NULL, &report));
  CHECK(has(report, "\"path\": \"direct\""));
  stasis_free(report);
  GOOD(stasis_resume(session, pid, NULL, NULL, NULL));
  CHECK(goes_on("attach"));
  stasis_dump_options dump;
  stasis_dump_options_init(&dump, sizeof dump);
  stasis_swap_options swap;
  stasis_swap_options_init(&swap, sizeof swap);
  CHECK(!dump.attach && dump.watch_ms == 0 && !swap.attach && swap.watch_ms == 0);
  /* Where it is there already. */
  const pid_t second = start("attach_second", "memory", "--size", "64M");
  CHECK(goes_on("attach_second"));
  GOOD(stasis_suspend(session, second, NULL, NULL, NULL));
  swap.attach = true;
  GOOD(stasis_swap(session, pid, second, &swap, NULL, &report));
  CHECK(has(report, "\"path\": \"direct\""));
  stasis_free(report);
  CHECK(goes_on("attach_second"));
  GOOD(stasis_resume(session, pid, NULL, NULL, NULL));
  CHECK(end(pid) == 0 && end(second) == 0);
  ok("suspend and swap bring the agent first");
}

/* Of jobs by their names: one that `stasis run` has only started, one in namespaces of its own. */
static void test_jobs(void) {
  char images[300], image[300];
  snprintf(images, sizeof images, "%s/images", folder);
  snprintf(image, sizeof image, "%s/of-the-job", folder);
  EXPECT(stasis_suspend_job(session, "plain", NULL, NULL, NULL), STASIS_NO_SUCH_PROCESS);
  EXPECT(stasis_suspend_job(session, "no name", NULL, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_suspend_job(session, NULL, NULL, NULL, NULL), STASIS_USAGE);
  EXPECT(stasis_suspend_job(NULL, "plain", NULL, NULL, NULL), STASIS_USAGE);
  const pid_t plain = start_job("plain", NULL);
  CHECK(goes_on("plain"));
  char *report = NULL;
  GOOD(stasis_suspend_job(session, "plain", NULL, NULL, &report));
  CHECK(has(report, "\"checkpointed\""));
  stasis_free(report);
  GOOD(stasis_resume_job(session, "plain", NULL, NULL, NULL));
  CHECK(goes_on("plain"));
  if (geteuid() != 0) { /* it needs namespaces, and CRIU */
    CHECK(end(plain) == 0);
    ok("a job by its name # SKIP in namespaces of its own: needs root");
    return;
  }
  const pid_t job = start_job("job", images);
  CHECK(goes_on("job"));
  struct told told = {0, 0};
  stasis_call call;
  stasis_call_init(&call, sizeof call);
  call.progress = on_progress;
  call.note = on_note;
  call.user_data = &told;
  GOOD(stasis_suspend_job(session, "job", NULL, &call, &report));
  CHECK(told.notes > 0 && has(report, "\"checkpointed\""));
  stasis_free(report);
  EXPECT(stasis_swap_jobs(session, "job", "plain", NULL, NULL, NULL), STASIS_WRONG_STATE);
  GOOD(stasis_swap_jobs(session, "plain", "job", NULL, NULL, NULL));
  CHECK(goes_on("job"));
  GOOD(stasis_recover_job(session, "plain", NULL, NULL));
  CHECK(goes_on("plain"));
  stasis_suspend_options suspend;
  stasis_suspend_options_init(&suspend, sizeof suspend);
  suspend.attach = true; /* it has its agent */
  GOOD(stasis_suspend_job(session, "job", &suspend, NULL, NULL));
  GOOD(stasis_recover_job(session, "job", NULL, &report));
  CHECK(has(report, "\"recovered\""));
  stasis_free(report);
  CHECK(goes_on("job"));
  /* What is wrong in there comes out. */
  stasis_resume_options resume;
  stasis_resume_options_init(&resume, sizeof resume);
  const stasis_gpu_pair pair = {"0", "no-gpu"};
  resume.gpu_pairs = &pair;
  resume.gpu_pair_count = 1;
  EXPECT(stasis_resume_job(session, "job", &resume, NULL, NULL), STASIS_DEVICE_MAP_INVALID);
  call.cancel = stasis_cancel_new();
  stasis_cancel_request(call.cancel);
  EXPECT(stasis_suspend_job(session, "job", NULL, &call, NULL), STASIS_INTERRUPTED);
  stasis_cancel_free(call.cancel);
  /* In the middle, in there. */
  setenv("STASIS_SIM_FAULTS", "checkpoint:delay=3s", 1);
  call.cancel = cancel = stasis_cancel_new();
  pthread_t thread;
  pthread_create(&thread, NULL, request_soon, NULL);
  EXPECT(stasis_suspend_job(session, "job", NULL, &call, NULL), STASIS_INTERRUPTED);
  pthread_join(thread, NULL);
  stasis_cancel_free(cancel);
  unsetenv("STASIS_SIM_FAULTS");
  CHECK(goes_on("job"));
  stasis_dump_options dump;
  stasis_dump_options_init(&dump, sizeof dump);
  EXPECT(stasis_dump_job(session, "job", &dump, NULL, NULL), STASIS_USAGE);
  dump.images_dir = image;
  dump.after = STASIS_AFTER_DUMP_RUNNING;
  dump.sync = false;
  call.cancel = NULL;
  GOOD(stasis_dump_job(session, "job", &dump, &call, &report));
  CHECK(told.most > 0 && has(report, image));
  stasis_free(report);
  EXPECT(stasis_dump_job(session, "job", &dump, NULL, NULL), STASIS_IMAGE_EXISTS);
  CHECK(goes_on("job"));
  stasis_inspect_options inspect;
  stasis_inspect_options_init(&inspect, sizeof inspect);
  inspect.images_dir = image;
  GOOD(stasis_inspect(session, &inspect, NULL, &report));
  CHECK(has(report, "\"name\": \"job\""));
  stasis_free(report);
  CHECK(end(plain) == 0);
  kill(job, SIGKILL);
  CHECK(waitpid(job, NULL, 0) == job);
  ok("jobs by their names");
}

static void test_images(void) {
  if (skip_without_root("images")) return;
  char first[300], second[300], moved[300], agent[400];
  snprintf(first, sizeof first, "%s/first", folder);
  snprintf(second, sizeof second, "%s/second", folder);
  snprintf(moved, sizeof moved, "%s/moved", folder);
  snprintf(agent, sizeof agent, "%s/lib/stasis/libstasis-preload.so", getenv("STASIS_BUILD"));
  setenv("LD_PRELOAD", agent, 1);
  const pid_t pid = start("images", "memory", "--still", "32M");
  unsetenv("LD_PRELOAD");
  CHECK(goes_on("images"));
  struct told told = {0, 0};
  stasis_call call;
  stasis_call_init(&call, sizeof call);
  call.note = on_note;
  call.user_data = &told;

  stasis_dump_options dump;
  stasis_dump_options_init(&dump, sizeof dump);
  CHECK(dump.base == NULL);
  dump.images_dir = first;
  dump.after = STASIS_AFTER_DUMP_RUNNING;
  dump.sync = false;
  dump.base = folder; /* is none: told, and all is written */
  GOOD(stasis_dump(session, pid, &dump, &call, NULL));
  CHECK(told.notes > 0);
  CHECK(goes_on("images"));
  dump.images_dir = second;
  dump.after = STASIS_AFTER_DUMP_END;
  dump.base = first;
  char *report = NULL;
  GOOD(stasis_dump(session, pid, &dump, NULL, &report));
  const char *taken = report == NULL ? NULL : strstr(report, "\"taken_bytes\": ");
  CHECK(taken != NULL && strtoll(taken + strlen("\"taken_bytes\": "), NULL, 10) >= 32 << 20);
  stasis_free(report);
  CHECK(waitpid(pid, NULL, 0) == pid);

  stasis_restore_options restore;
  stasis_restore_options_init(&restore, sizeof restore);
  restore.images_dir = second;
  restore.leave_suspended = true;
  GOOD(stasis_restore(session, &restore, NULL, NULL));
  CHECK(rename(second, moved) == 0);
  stasis_resume_options resume;
  stasis_resume_options_init(&resume, sizeof resume);
  CHECK(resume.images_dir == NULL);
  EXPECT(stasis_resume(session, pid, &resume, NULL, NULL), STASIS_WRONG_STATE);
  resume.images_dir = moved;
  GOOD(stasis_resume(session, pid, &resume, NULL, NULL));
  CHECK(goes_on("images"));
  CHECK(end(pid) == 0);
  ok("a dump beside an earlier image, a resume from one that was moved");
}

/* The caller's limit of file sizes ends nothing: it is an error of the call. */
static void test_file_size(void) {
  if (skip_without_root("a limit of file sizes")) return;
  char images[300];
  snprintf(images, sizeof images, "%s/limited", folder);
  const pid_t pid = start("limited", "memory", "--size", "8M");
  CHECK(goes_on("limited"));
  struct rlimit limit;
  CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = 1 << 20;
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  stasis_dump_options dump;
  stasis_dump_options_init(&dump, sizeof dump);
  dump.images_dir = images;
  stasis_error *error = stasis_dump(session, pid, &dump, NULL, NULL);
  CHECK(error != NULL);
  stasis_error_free(error);
  sigset_t waiting;
  CHECK(sigpending(&waiting) == 0 && !sigismember(&waiting, SIGXFSZ));
  limit.rlim_cur = before;
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  CHECK(goes_on("limited"));
  CHECK(end(pid) == 0);
  ok("a limit of file sizes");
}

static void test_group(void) {
  const pid_t pid = start("group", "tree", "--children", "2");
  CHECK(goes_on("group"));
  stasis_group *group = NULL;
  char *json = NULL;
  GOOD(stasis_group_open(session, pid, &group));
  GOOD(stasis_group_lock(group, 5000, NULL));
  EXPECT(stasis_group_lock(group, 5000, NULL), STASIS_WRONG_STATE);
  GOOD(stasis_group_checkpoint(group, NULL));
  GOOD(stasis_group_members(group, &json));
  CHECK(json != NULL && strstr(json, "\"checkpointed\"") != NULL);
  stasis_free(json);
  GOOD(stasis_group_restore(group, NULL, 0, NULL));
  GOOD(stasis_group_unlock(group));
  CHECK(goes_on("group"));
  stasis_group_close(group);
  CHECK(end(pid) == 0);
  EXPECT(stasis_group_open(session, pid, &group), STASIS_NO_SUCH_PROCESS);
  ok("a group");
}

int main(void) {
  snprintf(folder, sizeof folder, "/tmp/stasis-capi-XXXXXX");
  if (mkdtemp(folder) == NULL || getenv("STASIS_BUILD") == NULL) return 1;
  char path[400];
  snprintf(path, sizeof path, "%s/lib/stasis/sim/libcuda.so.1", getenv("STASIS_BUILD"));
  setenv("STASIS_LIBCUDA", path, 1);
  snprintf(path, sizeof path, "%s/gpus", folder);
  mkdir(path, 0700);
  setenv("STASIS_SIM_DIR", path, 1);
  setenv("STASIS_SIM_GPUS", "2x1G", 1);
  snprintf(path, sizeof path, "%s/state", folder);
  setenv("STASIS_STATE_DIR", path, 1);
  test_codes();
  test_session();
  test_options();
  test_process();
  test_cancel();
  test_operations();
  test_swap();
  test_attach();
  test_jobs();
  test_images();
  test_file_size();
  test_group();
  stasis_session_close(session);
  printf("1..%d\n", count);
  snprintf(path, sizeof path, "rm -rf %s", folder);
  if (system(path) != 0) return 1;
  return failed != 0;
}
