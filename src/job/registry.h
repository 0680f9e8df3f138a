// The names of jobs that `stasis run` looks after, or has started: one file each under the state
// directory, by which `stasis suspend NAME` finds the process, and the namespaces that it lives in.
//
// A record is of one life of a process (number and start time); one whose process has ended counts
// for nothing and is replaced. Functions are thread-safe, a Registration is one thread's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "checkpoint/journal.h"
#include "checkpoint/suspend_record.h"

namespace stasis::job {

struct JobEntry {
  std::string name;
  // The program itself, or the `stasis run` that looks after it.
  ProcessId process;
  // The first process of the job's namespaces; 0 if it has none.
  Pid init;
  // The job's number in there; 0 while it is being started or restored. Without namespaces: that of
  // `process`.
  Pid root;
  std::string state_dir;  // the state directory in there
  std::string images_dir;
  std::vector<std::string> command;
  std::vector<std::string> streams;  // JobRecord::streams
};

// A letter, then letters, digits, ".", "_" and "-", 64 at most: kUsage.
Result<void> check_job_name(const std::string& name);

class Registration {
 public:
  // Enters this process. kBusy if a living process has the name.
  static Result<Registration> enter(JobEntry entry);
  Registration(Registration&& other) noexcept
      : path_(std::move(other.path_)), entry_(std::move(other.entry_)) {
    other.path_.clear();
  }
  Registration& operator=(Registration&&) = delete;
  ~Registration();  // removes it

  // It stays for as long as its process lives, also without this object.
  void leave() { path_.clear(); }
  const JobEntry& entry() const { return entry_; }
  // The job has that number now; 0: it has gone.
  Result<void> set_root(Pid root);

 private:
  Registration(std::string path, JobEntry entry)
      : path_(std::move(path)), entry_(std::move(entry)) {}
  std::string path_;
  JobEntry entry_;
};

// The caller's own jobs whose process lives.
std::vector<JobEntry> own_jobs();

// The same; for root also jobs_of_users().
std::vector<JobEntry> all_jobs();
std::optional<JobEntry> find_job(const std::string& name);
// For root without a state directory of its own choice: the programs that other users have started
// under a name, where that user says so and the process is the user's own. Of nothing else in their
// records is made use: not of jobs in namespaces, into which a user would lead root.
std::vector<JobEntry> jobs_of_users();
// The name that `stasis run` gave to this process; empty if it gave none.
std::string name_of_job(Pid pid);
// The job in whose namespaces the process lives; nothing also if that cannot be seen.
std::optional<JobEntry> job_of(Pid pid, const std::vector<JobEntry>& jobs);

// The number that a process has in its own PID namespace. kNoSuchProcess.
Result<Pid> number_inside(Pid pid);
// What the job's own records of a suspended process say.
std::optional<SuspendedMemory> recall_suspended_of(const JobEntry& job, const Process& process);
// The operation on a process of the job, or one that was cut short, by those records.
std::optional<JournalEntry> operation_on(const JobEntry& job, const ProcessId& process);

}  // namespace stasis::job
