// Whom an operation is about: a process by its number, or a job by its name, which lives in
// namespaces of its own. There the work is done from within, so that the numbers, the records of
// operations and what is remembered of suspended memory are those that `stasis run` has too.
//
// One thread at a time.
#pragma once

#include <optional>
#include <string>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "job/registry.h"

namespace stasis::job {

// A number, or what may be the name of a job.
bool is_target(const std::string& text);

struct Target {
  std::string text;             // as it was given; empty: not at all
  Pid pid;                      // by find(), in the namespaces of `job` if it has some
  std::optional<JobEntry> job;  // if it is one that `stasis run` looks after

  // Finds the process. kNoSuchProcess for a name that no process has, kBusy for a job that is not
  // there yet.
  Result<void> find();
  bool is_elsewhere() const { return job && job->init.value != 0; }
};

// What a process that was born in a job's PID namespace enters besides. Paths: a helper process has
// no descriptors of ours.
struct Entry {
  std::string mounts;  // the file of the namespace in /proc; empty: there is nothing to enter
  std::string directory;
  std::string state_dir;
};

// Enters the mounts, and names the state directory. kNotPermitted.
Result<void> enter(const Entry& entry);

// The namespaces of a job, from outside: as long as it lives, children of this thread are born in
// its PID namespace.
class Elsewhere {
 public:
  // Nothing for a target that lives in this namespace. kNotPermitted.
  static Result<Elsewhere> open(const Target& target);
  Elsewhere(Elsewhere&& other) noexcept = default;
  Elsewhere& operator=(Elsewhere&&) = delete;
  ~Elsewhere();

  const Entry& entry() const { return entry_; }

 private:
  Elsewhere() = default;
  UniqueFd ours_;
  Entry entry_;
};

}  // namespace stasis::job
