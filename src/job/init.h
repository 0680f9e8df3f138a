// The first process of a job's namespaces: starts the job or has it restored, reaps, passes signals
// on, and forks a worker for each operation. docs/adr/0021-run-as-a-job.md. messages.h has what is
// said.
//
// Init owns the process and with it all of the namespace: the end of one is the end of the other.
// Not thread-safe.
#pragma once

#include <csignal>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/channel.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "job/io_uring.h"
#include "job/messages.h"
#include "job/streams.h"
#include "job/terminal.h"

namespace stasis::job {

// The lowest number of a process of the job. The numbers below are those of processes that restore
// it.
inline constexpr int kFirstNumber = 5000;

// The end of a remedy for rights that are missing.
inline constexpr const char* kOrAsAnotherUser =
    "; or as another user in a user namespace: STASIS_STATE_DIR=DIR unshare --user --map-root-user "
    "stasis run ...";

// Read by the agent of each program that the job starts (preload/environment.h). In the job's own
// /dev/shm, where every process of the job can read it.
inline constexpr const char* kEnvironmentFile = "/dev/shm/.stasis-environment";
// Makes it, with these changes or none. It is there before any process of the job is: in a
// directory with the sticky bit no other user can put another in its place then.
Result<void> make_environment_file(const std::string& changes);

// From now on the kernel gives process numbers from kFirstNumber on, in this PID namespace.
Result<void> number_from_first();

// One operation, in a process of its own in the namespaces. `streams` are those that the job has,
// or is to have.
using Work = std::function<WorkResult(const WorkOrder& order, const StreamEnds& streams)>;

struct JobSpec {
  std::vector<std::string> command;
  std::string preload;                   // LD_PRELOAD for it
  IoUring io_uring = IoUring::kAllowed;  // kAutomatic is kAllowed here
  sigset_t mask{};                       // the job's
  TerminalStreams terminal = 0;          // those of its streams that are to be a terminal
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
  Result<void> send(const InitOrder& order) const;
  // kProcessGone if it has ended: init does not end by itself.
  Result<InitEvent> receive() const;
  // Kills it and all in the namespace, and waits until nothing of it is left.
  void end();

 private:
  Init(int pid, Channel channel) : pid_(pid), channel_(std::move(channel)) {}

  int pid_ = 0;
  Channel channel_;
};

}  // namespace stasis::job
