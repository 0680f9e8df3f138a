// What the processes of a job say to each other: the supervisor, the first process of the job's
// namespaces (init), and the workers, of which init forks one for each operation. Sent as JSON over
// a channel.
//
// Values and functions; any thread.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/channel.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "job/terminal.h"

namespace stasis::job {

// --- For a worker, through init

struct RestoreOrder {
  std::string images_dir;
  std::string images_folder = {};  // Images::id()
};
struct SaveOrder {
  std::string images_dir;
  std::vector<std::string> command;    // for the manifest
  bool end = false;                    // the job, when its image is complete
  std::chrono::milliseconds limit{0};  // 0: none
  std::optional<std::string> base;     // the image before
  std::string images_folder = {};      // Images::id()
};
struct RecoverOrder {};
// Waits for the other parts of a job of several nodes, which begins anew.
struct MeetOrder {};

struct WorkOrder {
  std::variant<RecoverOrder, RestoreOrder, SaveOrder, MeetOrder> what;
  Pid root{0};  // of the job, which init enters; 0 before there is one
};

// "dump", "restore", "recover", "start".
std::string name_of(const WorkOrder& order);

// --- From a worker

struct Recovered {};
struct Met {};
struct Restored {
  Pid root;
  double seconds = 0;
  TerminalStreams terminal = 0;  // init enters it
};
struct Saved {
  std::string size;  // for people
  double seconds = 0;
  std::optional<double> downtime;
};
// Not saved: the job was to go on, and the user has suspended it.
struct WasSuspended {};
// Init says so of a worker that has not answered: "was killed by signal 9".
struct WorkerDied {
  std::string how;
};

struct WorkResult {
  std::variant<Recovered, Restored, Saved, WasSuspended, Met, Error, WorkerDied> what;
  std::vector<std::string> notes;  // for people
};

// --- For init

struct StartJob {};
struct SendSignal {
  int number = 0;
  bool group = false;  // to the job's process group
};
struct Resize {  // the job's terminal
  int rows = 0;
  int columns = 0;
};
struct StopWorker {};  // SIGTERM for the worker, if there is one
struct KillWorker {};
using InitOrder = std::variant<StartJob, WorkOrder, SendSignal, Resize, StopWorker, KillWorker>;

// --- From init

// The namespaces are there.
struct Ready {};
// They are not, or the job could not be started.
struct Failed {
  Error error;
};
struct Started {
  Pid root;
  TerminalStreams terminal = 0;
};
// By exec.
struct NotStarted {
  int error_number = 0;
};
// The job has, as waitpid(2) says it; never in the middle of a worker's work.
struct Ended {
  int status = 0;
};
using InitEvent = std::variant<Ready, Failed, Started, NotStarted, WorkResult, Ended>;

// A worker gets the InitOrder that init got, and answers with an InitEvent. Of a result that a
// message cannot hold the notes are left out, and the error is shortened.
Result<void> send(const Channel& channel, const InitOrder& order,
                  std::span<const UniqueFd> descriptors = {});
Result<void> send(const Channel& channel, const InitEvent& event);
// Nothing of a malformed message.
std::optional<InitOrder> parse_order(const Channel::Message& message);
std::optional<InitEvent> parse_event(const Channel::Message& message);

}  // namespace stasis::job
