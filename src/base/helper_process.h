// A forked process that works for this one and ends with it, for work that may hang, crash or be
// killed without this process coming to harm.
//
// Owns the process: ending the handle kills it and waits until nothing of it is left. It holds
// nothing of ours but its end of the channel: no other descriptor, no terminal, no signal handler.
// Not thread-safe.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "base/channel.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis {

class HelperProcess {
 public:
  // Runs `serve` in the new process, which ends when that returns. To be called while this process
  // has one thread: what other threads hold at the moment of a fork is held for ever in the child.
  // `name` (at most 15 characters) is what `ps` shows.
  static Result<HelperProcess> start(const char* name,
                                     const std::function<void(const Channel&)>& serve);
  // Runs a program instead, which is to call serve_as_helper(), in a process that may have threads.
  // It ends when it sees the channel closed, and not with the thread that has started it. kIo if it
  // cannot be started.
  static Result<HelperProcess> start_program(const std::string& program,
                                             std::span<const std::string> arguments);

  HelperProcess(HelperProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)),
        process_(std::move(other.process_)),
        channel_(std::move(other.channel_)),
        end_(std::move(other.end_)) {}
  HelperProcess& operator=(HelperProcess&&) = delete;
  ~HelperProcess() { end(); }

  const Channel& channel() const { return channel_; }
  Pid pid() const { return Pid{pid_}; }
  bool running() const { return pid_ != 0 && process_.alive(); }
  // Waits this long for a process that ends by itself, then does as end(): so that how_it_ended()
  // knows.
  bool end_after(int timeout_ms);
  // The same, but tells the process to end: it sees the channel closed.
  bool let_end(int timeout_ms);
  // Kills it if it still runs. True if nothing of it is left; false if it is stuck in the kernel
  // and cannot even be killed within five seconds.
  bool end();
  // How it ended: "was killed by signal 11 (Segmentation fault)", "ended with status 1". To be
  // asked after end(); empty if it ran until then.
  const std::string& how_it_ended() const { return end_; }

 private:
  static Result<HelperProcess> held(int pid, Channel channel);
  HelperProcess(int pid, Pidfd process, Channel channel)
      : pid_(pid), process_(std::move(process)), channel_(std::move(channel)) {}

  int pid_ = 0;
  Pidfd process_;
  Channel channel_;
  std::string end_;
};

// In a program that start_program() runs, first of all: lets the process end at once with the
// thread that has started it, in the middle of whatever it does. For work that lasts no longer than
// a call.
void end_with_starter();
// In a program that start_program() runs: does what start() does in the process that it forks.
[[noreturn]] void serve_as_helper(const char* name,
                                  const std::function<void(const Channel&)>& serve);

// Where a program of ours finds the socket that it is started with.
inline constexpr int kHelperSocket = 3;
// Starts `program` with `socket` as that, in a process group of its own and with no signal blocked.
// Its process number; kIo if it cannot be started.
Result<int> spawn_with_socket(const std::string& program, std::span<const std::string> arguments,
                              const UniqueFd& socket);

}  // namespace stasis
