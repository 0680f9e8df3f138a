// state-probe: what the kernel keeps for a process, set to what it is not by default, and compared
// later: kept, or lost.
//
// One file per subject (state_NAME.cc), each with a function add_NAME(Probe&) that is called in
// kSubjects of state.cc. A subject adds items; an item sets itself and says later what it is.
// To add one, write such a function.
//
// A Probe is used by the process's main thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/workloads/runner.h"

namespace stasis::workloads {

// Nothing, or why not.
using Problem = std::optional<std::string>;

// "what failed: the system's text of errno".
std::string because(const std::string& what);
// Of a system call's answer: nothing, or because(what).
Problem answer(long result, const std::string& what);

// A thread that does what it is told, for what belongs to a thread.
class Worker {
 public:
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  void run(const std::function<void()>& work);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;
  bool stop_ = false;
  std::jthread thread_;
};

class Probe {
 public:
  Probe(bool is_child, const Options& options)
      : is_child_(is_child),
        with_locks_(options.locks),
        signals_threads_(options.signal_threads),
        files_(options.report) {}
  // Is the parent in the tree as well?
  bool is_child() const { return is_child_; }
  // Locks and leases of files: without --file-locks none is dumped.
  bool with_locks() const { return with_locks_; }
  // Files that signal a thread: plain CRIU restores none.
  bool signals_threads() const { return signals_threads_; }
  Worker& worker() { return worker_; }
  // A file beside the report, of this process's own.
  std::string file(const char* name) const {
    return files_ + "." + name + (is_child_ ? ".plain-file" : ".cuda-file");
  }

  // What `get` says is what it has to say later. `set` says why it cannot be set here.
  void add(const char* subject, const char* name, const std::function<Problem()>& set,
           const std::function<std::string()>& get);
  // The same of the worker's thread, which all such items share.
  void add_for_thread(const char* subject, const char* name, const std::function<Problem()>& set,
                      const std::function<std::string()>& get);
  // The same of a thread that no other item uses, which ends with the process.
  void add_for_own_thread(const char* subject, const char* name,
                          const std::function<Problem()>& set,
                          const std::function<std::string()>& get);
  // `check` says what is wrong.
  void add_check(const char* subject, const char* name, const std::function<Problem()>& set,
                 std::function<Problem()> check);

  // A thread that makes `call`, which does not come back as long as all is well. Without any
  // signal: those of the tool are for the others. Of the subject "system calls that wait".
  void add_call(const char* name, const std::function<long()>& call);

  // A line for each item: "kept|lost|not settable here", subject, name, and why; by tabulators.
  std::string report();

 private:
  struct Item {
    const char* subject;
    const char* name;
    Problem unset;
    std::function<Problem()> check;
  };
  void add_in(Worker& worker, const char* subject, const char* name,
              const std::function<Problem()>& set, const std::function<std::string()>& get);

  bool is_child_;
  bool with_locks_;
  bool signals_threads_;
  std::string files_;
  Worker worker_;
  std::vector<Item> items_;
};

// Those that items send and that only their checks take.
void block_signals_that_wait();
// The first of three signals that files send.
int signals_of_files();
// For items of the child, which has a copy of its parent's memory.
void make_memory_of_both();
// For an item of the child: the root of the tree holds the lock of a file before the child is made.
void hold_lock_for_child(const std::string& files);

// The subjects.
void add_scheduling(Probe& probe);
void add_timers(Probe& probe);
void add_signals(Probe& probe);
void add_calls(Probe& probe);
void add_queues(Probe& probe);
void add_descriptors(Probe& probe);
void add_threads(Probe& probe);
void add_attributes(Probe& probe);
void add_memory(Probe& probe);
void add_socket_options(Probe& probe);

}  // namespace stasis::workloads
