// state-probe: a CUDA process and a child without CUDA, both of which set whatever the kernel keeps
// for a process to what it is not by default, and say on demand what has become of it.
//
// The demand is a file, FILE.ask for --report FILE; the answers are FILE.cuda and FILE.plain, each
// complete when it has its name. tools/state-table makes docs/what-survives.md of them.
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>

#include "tests/workloads/gpu.h"
#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

using Subject = void (*)(Probe&);
// Those that set what others would inherit come last.
constexpr Subject kSubjects[] = {add_signals,        add_timers,    add_calls,      add_queues,
                                 add_memory,         add_threads,   add_scheduling, add_descriptors,
                                 add_socket_options, add_attributes};

void answer_to(Run& run, Probe& probe, const std::string& name) {
  const std::string& file = run.options().report;
  const std::string own = file + "." + name;
  if (access((file + ".ask").c_str(), F_OK) != 0 || access(own.c_str(), F_OK) == 0) return;
  const std::string text = probe.report();
  std::ofstream(own + ".new") << text;
  std::rename((own + ".new").c_str(), own.c_str());
}

void set_all(Probe& probe) {
  for (const Subject subject : kSubjects)
    subject(probe);
}

}  // namespace

void run_state(Run& run) {
  if (run.options().report.empty()) programs::die(2, "kind state needs --report");
  // Before there is another thread: a thread that takes one of them ends the process.
  block_signals_that_wait();
  make_memory_of_both();
  if (run.options().locks) hold_lock_for_child(run.options().report);
  int ready[2] = {-1, -1};
  if (pipe2(ready, O_CLOEXEC) != 0) programs::die(1, because("pipe2"));
  const int child = fork();
  if (child == 0) {
    Probe probe(true, run.options());
    set_all(probe);
    (void)!write(ready[1], "", 1);
    const int parent = getppid();
    while (getppid() == parent && !Run::stop_requested()) {
      answer_to(run, probe, "plain");
      usleep(20'000);
    }
    _exit(0);
  }
  [[maybe_unused]] const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  Probe probe(false, run.options());
  set_all(probe);
  char byte = 0;
  if (read(ready[0], &byte, 1) != 1) programs::die(1, "the child has ended");
  while (run.next()) {
    answer_to(run, probe, "cuda");
    run.finish();
  }
  kill(child, SIGKILL);
  std::fflush(stdout);
  _exit(0);  // threads of the probe wait for ever
}

}  // namespace stasis::workloads
