// The process that is acted on: this program again, started by exec because CUDA does not survive a
// fork, doing what it is told over two pipes. One command is one line, and so is its answer.
//
// Ownership: Target owns the process and kills it. Threads: one thread at a time, except that
// commands which only read the target's memory cells (flag, done) answer while its API is locked.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace stasis::conformance {

class Target {
 public:
  // Starts a target that has done nothing yet; "environment" entries like "A=b" are added to it.
  explicit Target(const std::string& environment = {});
  ~Target();
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  pid_t pid() const { return pid_; }
  // The answer of a command; -1 if none comes in time or the target is gone.
  long ask(const std::string& command, int timeout_ms = 20'000);
  std::string ask_text(const std::string& command, int timeout_ms = 20'000);
  void kill();  // and does not reap it before reap()
  bool died();  // by a signal, of its own accord
  void reap();

 private:
  pid_t pid_ = -1;
  int to_ = -1;
  int from_ = -1;
};

int target_main();

// The commands. All answer a result code (of the first call that failed) unless said otherwise.
//   init             cuInit, primary context, current on the command thread
//   cuinit           only cuInit
//   alloc KIND       4 MiB with a pattern: device small pinned registered pool vmm managed
//   big MIB          device memory, filled
//   check            how many allocations have another content or address than before
//   add              launches a kernel that changes every allocation that `check` knows
//   flagkernel       a kernel that runs until `release`; flaghost: a host function
//   spinhost MS      host functions that take MS in all
//   release          ends them
//   sync             cuCtxSynchronize
//   freemib          cuMemGetInfo's free MiB
//   call NAME        calls that function on a thread of its own
//   done             how many of those have returned
//   busy N           N threads that launch and synchronise without pause
//   stop             ends them; the number of calls they made
//   progress         the number of calls so far
//   ipcget           a legacy IPC handle of the first allocation, as hexadecimal text
//   ipcopen HEX      opens it; ipcclose
//   vmmfd            an exported descriptor of VMM memory; vmmimport PID FD imports and maps it
//   tid              the id of a thread that is not the main one
//   exit             ends the process

}  // namespace stasis::conformance
