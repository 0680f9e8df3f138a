// One `criu swrk` process and the RPC socket to it.
//
// Owns the process and reaps it. Moves, never copies. One thread at a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

class InsideCriu;

namespace criu_rpc {
struct Request;
struct Response;
}  // namespace criu_rpc

class CriuProcess {
 public:
  struct StartOptions {
    // Where CRIU looks for plugins: a directory without any, so that a CUDA plugin installed on the
    // machine does not act on the same processes as the tool. It must exist, or criu fails.
    std::string plugin_dir;
    // A group of its own, so that Ctrl-C at the terminal reaches the tool and not criu in the
    // middle of its work.
    bool own_process_group = true;
    // Leaves standard input as it is: CRIU takes the terminal of a restored shell job from there.
    // Otherwise it is /dev/null.
    bool keep_stdin = false;
    // Given to criu at the numbers kFirstInherited, kFirstInherited + 1, ...
    std::vector<const UniqueFd*> inherit;
    // Not given to a criu that has descriptors to inherit.
    const InsideCriu* hidden = nullptr;
    // What InsideCriu::find_library() gives, for a restore: criu binds sockets to addresses that
    // are not here. May be empty.
    std::string binding_library = {};
  };
  static constexpr int kFirstInherited = 4;

  // Starts `path` with no descriptor of the tool's but those above. kCriuMissing if it is no
  // program.
  static Result<CriuProcess> start(const std::string& path, const StartOptions& options);

  CriuProcess(CriuProcess&& other) noexcept;
  CriuProcess& operator=(CriuProcess&&) = delete;
  // Kills a criu that still runs: finish() is the way for a good end.
  ~CriuProcess();

  Result<void> send(const criu_rpc::Request& request) const;
  // The next message; nothing if none came in time; kCriuFailed if criu ended instead.
  Result<std::optional<criu_rpc::Response>> receive(std::chrono::milliseconds timeout) const;

  // Waits for criu's end after its last message, killing it if it does not end by itself, and says
  // how it ended: "exited with status 1", "was killed by signal 9". One that SIGKILL does not end
  // within some seconds is left behind.
  std::string finish(std::chrono::milliseconds timeout);
  // It waits in the kernel for what another process holds (proc/held_files.h), ends when that is
  // let go, and traces the processes of the dump or restore until then. 0: none was left.
  Pid left_behind() const { return left_behind_; }
  void kill() const;
  // Makes every further write of criu to a file fail (EFBIG), so that a dump rolls back by itself
  // and in order. Killed instead, criu leaves its parasite's 2 MiB mapped in the target.
  void starve() const;

  // Signs of life. All zero if it has ended.
  struct Activity {
    std::uint64_t processor_ticks = 0;  // its own and that of the children it has waited for
    bool blocked = false;               // in the kernel, on a disk as a rule, where no signal helps
  };
  Activity activity() const;

  // 0 once it has ended.
  Pid pid() const { return Pid{pid_}; }

  // What criu wrote to its standard error, before it had a log; bounded.
  std::string early_errors() const;

 private:
  CriuProcess(Pidfd pidfd, pid_t pid, UniqueFd socket, UniqueFd errors)
      : pidfd_(std::move(pidfd)),
        pid_(pid),
        socket_(std::move(socket)),
        errors_(std::move(errors)) {}
  Pidfd pidfd_;
  pid_t pid_ = 0;  // 0 once it is reaped
  bool own_group_ = false;
  Pid left_behind_;
  UniqueFd socket_;
  UniqueFd errors_;
};

}  // namespace stasis
