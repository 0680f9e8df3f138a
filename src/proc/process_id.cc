#include "proc/process_id.h"

#include <unistd.h>

#include "proc/procfs.h"

namespace stasis {

ProcessId own_id() {
  const Pid self{static_cast<int>(::getpid())};
  const auto info = proc::ProcFs().process(self);
  return info ? info->id() : ProcessId{self};
}

bool may_be_same(const ProcessId& a, const ProcessId& b) {
  return a.pid == b.pid &&
         (a.start_ticks == b.start_ticks || a.start_ticks == 0 || b.start_ticks == 0);
}

bool is_alive(const ProcessId& id) {
  const proc::ProcFs procfs;
  const auto info = procfs.process(id.pid);
  return info && may_be_same(info->id(), id) && !procfs.has_ended(id.pid);
}

}  // namespace stasis
