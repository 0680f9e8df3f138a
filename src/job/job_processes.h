// The processes of a job as its supervisor has them: the init of its namespaces, the pipes of its
// standard streams, the terminal, and the name by which other verbs find it.
//
// Owns them: the job ends with it. Moves. One thread at a time.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "job/init.h"
#include "job/messages.h"
#include "job/registry.h"
#include "job/streams.h"

namespace stasis::job {

class JobProcesses {
 public:
  // Makes the pipes.
  static Result<JobProcesses> prepare();
  // Starts init, which waits for orders. Called while this process has one thread. The errors of
  // Init::start().
  Result<void> start(JobSpec spec);

  Pid init() const { return init_->pid(); }
  int fd() const { return init_->fd(); }  // readable when there is an event
  Result<void> send(const InitOrder& order) const { return init_->send(order); }
  Result<InitEvent> receive() const { return init_->receive(); }

  // The job is found by `name` from now on; by "job-" and our own number, if that is empty.
  Result<void> enter_name(const std::string& name, const std::string& images_dir,
                          std::vector<std::string> command);
  // Names the job's first process, too.
  Result<void> name_root(Pid root) { return registration_->set_root(root); }

  // Begins to copy. Once, and after the last fork: it makes threads.
  Result<void> start_streams() { return streams_.start(); }
  // The job runs, with these streams as its terminal.
  Result<void> connect_terminal(TerminalStreams terminal);
  // Gives the job's terminal the size of ours.
  Result<void> fit_terminal() const;

  // Ends all of it. What of its output could not be written, for people.
  std::vector<std::string> end();

 private:
  JobProcesses(Streams streams, StreamEnds ends, std::vector<std::string> names)
      : ends_(std::move(ends)), names_(std::move(names)), streams_(std::move(streams)) {}

  StreamEnds ends_;                 // the job's, until init has them
  std::vector<std::string> names_;  // of these, as CRIU calls them
  std::optional<Registration> registration_;
  Streams streams_;
  std::optional<Init> init_;
};

}  // namespace stasis::job
