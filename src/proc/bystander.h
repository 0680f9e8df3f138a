// A process with the rights of another process's user, and in no Landlock domain but the tool's
// own.
//
// No file and no system call tells whether a process has put itself into a Landlock domain
// (landlock_restrict_self(2)). But a process in one may look into no process outside of it,
// whatever else its rules allow (hook_ptrace_access_check() of security/landlock/task.c). So the
// tool asks the process itself to look into a bystander, which it could if it were in no domain: a
// refusal tells that it is in one. Every error of the kind has another cause where the process has
// another user namespace, PID namespace or a profile of AppArmor or SELinux: then there is no
// bystander for it.
//
// Owns the process, /bin/cat, which ends with its owner. It has nothing of the tool's: neither
// memory nor descriptors, since its user may look into it. Not thread-safe.
#pragma once

#include <optional>

#include "base/fd.h"
#include "base/ids.h"

namespace stasis::proc {

class Bystander {
 public:
  // Nothing where asking would tell nothing, or the kernel has no Landlock.
  static std::optional<Bystander> for_thread(Pid pid, Tid thread);

  Bystander(Bystander&& other) noexcept;
  Bystander& operator=(Bystander&&) = delete;
  ~Bystander();

  Pid pid() const { return Pid{pid_}; }
  // Is it one for that thread as well?
  bool suits(Pid pid, Tid thread) const;

 private:
  struct User {
    unsigned uid = 0;
    unsigned gid = 0;
    bool operator==(const User&) const = default;
  };
  static std::optional<User> user_of(Pid pid, Tid thread);
  Bystander(int pid, User user, UniqueFd input)
      : pid_(pid), user_(user), input_(std::move(input)) {}

  int pid_;
  User user_;
  UniqueFd input_;  // it ends when this is closed
};

}  // namespace stasis::proc
