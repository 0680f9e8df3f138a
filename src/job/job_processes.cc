#include "job/job_processes.h"

#include <unistd.h>

#include <utility>

#include <fmt/format.h>

#include "checkpoint/journal.h"
#include "job/terminal.h"

namespace stasis::job {

Result<JobProcesses> JobProcesses::prepare() {
  STASIS_TRY_ASSIGN(auto streams, Streams::make());
  auto ends = streams.take_ends();
  std::vector<std::string> names;
  for (const UniqueFd& end : ends) {
    STASIS_TRY_ASSIGN(auto name, pipe_name(end));
    names.push_back(std::move(name));
  }
  return JobProcesses(std::move(streams), std::move(ends), std::move(names));
}

Result<void> JobProcesses::start(JobSpec spec) {
  STASIS_TRY_ASSIGN(auto init, Init::start(std::move(spec), std::move(ends_)));
  init_.emplace(std::move(init));
  return {};
}

Result<void> JobProcesses::enter_name(const std::string& name, const std::string& images_dir,
                                      std::vector<std::string> command) {
  STASIS_TRY_ASSIGN(auto state, journal_directory());
  STASIS_TRY_ASSIGN(auto entered,
                    Registration::enter({name.empty() ? fmt::format("job-{}", ::getpid()) : name,
                                         {Pid{static_cast<int>(::getpid())}},
                                         init_->pid(),
                                         {},
                                         state,
                                         images_dir,
                                         std::move(command),
                                         names_}));
  registration_.emplace(std::move(entered));
  return {};
}

Result<void> JobProcesses::connect_terminal(TerminalStreams terminal) {
  // The job's terminal obeys the keys, not the terminal of `stasis run`.
  if ((terminal & 1U) != 0) streams_.make_raw();
  return fit_terminal();
}

Result<void> JobProcesses::fit_terminal() const {
  const winsize size = our_size();
  if (size.ws_row == 0 && size.ws_col == 0) return {};
  return init_->send(Resize{size.ws_row, size.ws_col});
}

std::vector<std::string> JobProcesses::end() {
  init_->end();
  return streams_.finish();
}

}  // namespace stasis::job
