#include "job/io_uring.h"

#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "base/fd.h"
#include "proc/procfs.h"

namespace stasis::job {

int do_without_io_uring() {
  // One number in all of x86's calling conventions; x32 has a bit more (asm/unistd.h).
  constexpr unsigned kX32Bit = 0x40000000;
  std::array<sock_filter, 5> program = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, ~kX32Bit),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{program.size(), program.data()};
  // Without that flag kernels before 5.16 forbid the processor to run loads ahead of stores (SSBD),
  // which slows the program down (Documentation/admin-guide/hw-vuln/spectre.rst, spec_ctrl.rst).
  const auto install = [&] {
    return ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW,
                     &filter) == 0;
  };
  // For the agent (preload/export_trial.cc).
  ::setenv("STASIS_NO_IO_URING", "1", 1);
  if (install()) return 0;
  if (errno == EACCES && ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && install()) return 0;
  return errno;
}

bool keeps_ways_to_privileges() {
  const auto capabilities = proc::ProcFs().effective_capabilities();
  return capabilities && (*capabilities >> CAP_SYS_ADMIN & 1) != 0;
}

bool can_do_without_io_uring_freely() {
  const std::uint32_t action = SECCOMP_RET_ERRNO;
  return keeps_ways_to_privileges() && !proc::ProcFs().in_own_user_namespace() &&
         ::syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0;
}

bool is_torchrun(const std::vector<std::string>& command) {
  const auto name = [](const std::string& path) { return path.substr(path.rfind('/') + 1); };
  if (command.empty()) return false;
  if (name(command.front()) == "torchrun") return true;
  if (!name(command.front()).starts_with("python")) return false;
  // Of the interpreter's own options, only these two tell what it runs.
  for (std::size_t i = 1; i < command.size(); ++i) {
    const std::string& word = command[i];
    if (word == "-m" && i + 1 < command.size()) {
      const std::string& module = command[i + 1];
      return module == "torch.distributed.run" || module == "torch.distributed.launch";
    }
    if (!word.starts_with('-')) return name(word) == "torchrun";
  }
  return false;
}

Error cannot_do_without_io_uring(int error_number) {
  return refusal({"io-uring",
                  Severity::kRed,
                  {},
                  errno_error("cannot keep the program from io_uring", error_number).message,
                  "leave out --no-io-uring, or turn io_uring off for the machine "
                  "(sysctl kernel.io_uring_disabled=2)"});
}

}  // namespace stasis::job
