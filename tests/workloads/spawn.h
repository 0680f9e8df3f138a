// A child that runs this same program as another kind of workload.
//
// Child owns the process: its owner ends it by stop(). Left alone it outlives its parent, as a
// child of a crashed program would. Used by one thread.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"

namespace stasis::workloads {

class Child {
 public:
  // Starts "/proc/self/exe ARGUMENTS...". Ends the program if that fails.
  explicit Child(const std::vector<std::string>& arguments);
  Child(Child&& other) noexcept;
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  Child& operator=(Child&&) = delete;
  ~Child() = default;

  Pid pid() const { return pid_; }
  // True once it has ended, with whatever status.
  bool exited();
  // "ended with status 1", "was killed by signal 9". Only after exited().
  std::string how_it_ended() const;
  bool ended_well() const;
  int exit_status() const;  // -1 if it was killed by a signal

  // SIGTERM, and waits.
  void stop();
  void request_stop() const;
  void wait();

 private:
  Pid pid_;
  bool exited_ = false;
  int status_ = 0;
};

void sleep_ms(int milliseconds);

class Run;

// Runs `programs` (arguments of this one, beginning with a kind) as children, with --status,
// --pause-ms and --size of its own. A round is one in which every child verified a round more. The
// root restarts nothing: a child that ends is a mismatch. In the end tells them to stop.
void supervise(Run& run, const std::vector<std::vector<std::string>>& programs);

}  // namespace stasis::workloads
