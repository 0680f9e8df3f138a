// Whom a verb is about: a process by its number, or a job by its name, which lives in namespaces of
// its own. There the work is done from within, so that the numbers, the records of operations and
// what is remembered of suspended memory are those that `stasis run` has too.
//
// One thread at a time, and while the process has one.
#pragma once

#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "base/fd.h"
#include "cli/verbs.h"
#include "job/registry.h"

namespace stasis::cli {

struct Target {
  std::string text;                  // as it was given; empty: not at all
  Pid pid;                           // by find(), in the namespaces of `job` if it has some
  std::optional<job::JobEntry> job;  // if it is one that `stasis run` looks after

  // Finds the process. kNoSuchProcess for a name that no process has, kBusy for a job that is not
  // there yet.
  Result<void> find();
  bool is_elsewhere() const { return job && job->init.value != 0; }
};

// A number or a name.
CLI::Option* add_target(CLI::App& command, Target& target, const std::string& word = "PID");

// The namespaces of a job, from outside: children of this process are born in its PID namespace as
// long as it lives; they enter the rest by themselves.
class Elsewhere {
 public:
  // Enters nothing for a target that lives in this namespace. kNotPermitted.
  static Result<Elsewhere> open(const Target& target);
  Elsewhere(Elsewhere&& other) noexcept = default;
  Elsewhere& operator=(Elsewhere&&) = delete;
  ~Elsewhere();

  // In a child: the mounts, and the state directory. kNotPermitted.
  Result<void> enter() const;

 private:
  Elsewhere() = default;
  UniqueFd ours_;
  std::string mounts_;  // their file in /proc: a helper process has no descriptors of ours
  std::string directory_;
  std::string state_dir_;
};

// Finds the target and goes to where it is. Comes back there in a child of the process that was
// called, which waits, passes signals on and ends with the same status.
Result<void> reach(Context& context, Target& target);

}  // namespace stasis::cli
