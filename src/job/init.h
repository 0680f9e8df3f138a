// The first process of a job's namespaces: starts the job or has it restored, reaps, passes signals
// on, and forks a worker for each operation. docs/adr/0021-run-as-a-job.md.
// Requests and answers go over a channel, as JSON:
//   {"do": "start"}, {"do": "work", "request": {...}}, {"do": "signal", "number": N, "group": BOOL}
//   {"do": "stop"}, {"do": "kill"}         SIGTERM, SIGKILL for the worker, if there is one
//   {"event": "ready"}                     the namespaces are there
//   {"event": "failed", "error": {...}}    they are not, or the job could not be started
//   {"do": "size", "rows": N, "columns": N}: of its terminal
//   {"event": "started", "root": PID, "terminal": STREAMS}
//   {"event": "not-started", "errno": N}   by exec
//   {"event": "worked", "result": {...}}   what the worker gave; or {"died": TEXT}
//   {"event": "ended", "status": N}        the job has, as waitpid(2) says it; never in the middle
//                                          of a worker's work
//
// Init owns the process and with it all of the namespace: the end of one is the end of the other.
// Not thread-safe.
#pragma once

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/channel.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "job/streams.h"
#include "job/terminal.h"

namespace stasis::job {

// The lowest number of a process of the job. The numbers below are those of processes that restore
// it.
inline constexpr int kFirstNumber = 5000;

// Read by the agent of each program that the job starts (preload/environment.h). In the job's own
// /dev/shm, where every process of the job can read it.
inline constexpr const char* kEnvironmentFile = "/dev/shm/.stasis-environment";
// Makes it, with these changes or none. It is there before any process of the job is: in a
// directory with the sticky bit no other user can put another in its place then.
Result<void> make_environment_file(const std::string& changes);

// From now on the kernel gives process numbers from kFirstNumber on, in this PID namespace.
Result<void> number_from_first();

// An error on its way between processes of this program.
nlohmann::json error_to_json(const Error& error);
Error error_from_json(const nlohmann::json& object);

// One operation, in a process of its own in the namespaces. The request has "root", the number of
// the job, or 0 before there is one. `streams` are those that the job has, or is to have. The
// result of a restore that succeeded has "root" as well.
using Work =
    std::function<nlohmann::json(const nlohmann::json& request, const StreamEnds& streams)>;

struct JobSpec {
  std::vector<std::string> command;
  std::string preload;  // LD_PRELOAD for it
  bool without_io_uring = false;
  sigset_t mask{};               // the job's
  TerminalStreams terminal = 0;  // those of its streams that are to be a terminal
  winsize size{};
  // Directories that the job sees as they are outside, also below /dev/shm, of which it has its
  // own.
  std::vector<std::string> keep;
  Work work;
};

class Init {
 public:
  // Called while this process has one thread. kNotPermitted without the right to make namespaces.
  static Result<Init> start(JobSpec spec, StreamEnds streams);
  Init(Init&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)), channel_(std::move(other.channel_)) {}
  Init& operator=(Init&&) = delete;
  ~Init() { end(); }

  Pid pid() const { return Pid{pid_}; }
  int fd() const { return channel_.fd(); }  // readable when there is an event
  Result<void> send(const nlohmann::json& message) const;
  // kProcessGone if it has ended: init does not end by itself.
  Result<nlohmann::json> receive() const;
  // Kills it and all in the namespace, and waits until nothing of it is left.
  void end();

 private:
  Init(int pid, Channel channel) : pid_(pid), channel_(std::move(channel)) {}

  int pid_ = 0;
  Channel channel_;
};

}  // namespace stasis::job
