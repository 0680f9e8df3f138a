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
  explicit Probe(bool is_child) : is_child_(is_child) {}
  // Is the parent in the tree as well?
  bool is_child() const { return is_child_; }
  Worker& worker() { return worker_; }

  // What `get` says is what it has to say later. `set` says why it cannot be set here.
  void add(const char* subject, const char* name, const std::function<Problem()>& set,
           const std::function<std::string()>& get);
  // The same of the worker's thread.
  void add_for_thread(const char* subject, const char* name, const std::function<Problem()>& set,
                      const std::function<std::string()>& get);
  // `check` says what is wrong.
  void add_check(const char* subject, const char* name, const std::function<Problem()>& set,
                 std::function<Problem()> check);

  // A line for each item: "kept|lost|not settable here", subject, name, and why; by tabulators.
  std::string report();

 private:
  struct Item {
    const char* subject;
    const char* name;
    Problem unset;
    std::function<Problem()> check;
  };
  bool is_child_;
  Worker worker_;
  std::vector<Item> items_;
};

// Those that add_signals() sends and nobody takes.
void block_signals_that_wait();

// The subjects.
void add_scheduling(Probe& probe);
void add_timers(Probe& probe);
void add_signals(Probe& probe);
void add_calls(Probe& probe);
void add_attributes(Probe& probe);
void add_memory(Probe& probe);
void add_sockets(Probe& probe);

}  // namespace stasis::workloads
