#include "proc/in_namespace.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>

#include <thread>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::proc {

bool in_namespace(Pid pid, Namespace kind, const std::function<void()>& work, ino_t number) {
  const bool is_network = kind == Namespace::kNetwork;
  const auto space =
      open_file(AT_FDCWD, fmt::format("/proc/{}/ns/{}", pid.value, is_network ? "net" : "ipc"),
                O_RDONLY | O_NONBLOCK);
  struct stat info {};
  if (!space || ::fstat(space->get(), &info) != 0) return false;
  if (number != 0 && info.st_ino != number) return false;
  bool entered = false;
  std::thread([&] {
    entered = ::setns(space->get(), is_network ? CLONE_NEWNET : CLONE_NEWIPC) == 0;
    if (entered) work();
  }).join();
  return entered;
}

}  // namespace stasis::proc
