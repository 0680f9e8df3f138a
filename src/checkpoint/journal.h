// The journal: what the tool is about to do to which targets, written down before it does it, so
// that `stasis recover` can bring the targets of a killed operation back.
//
// One file per target tree under the state directory: JSON, replaced as a whole. The process that
// holds the lock on its `.lock` file is the operation under way; the kernel drops that lock when
// the holder dies, however it dies. One thread at a time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/cuda_state.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/operation.h"
#include "base/result.h"
#include "proc/procfs.h"

namespace stasis {

// Its start is not known before CRIU has made the process that a restore brings back.
struct JournalTarget : ProcessId {
  JournalTarget() = default;
  JournalTarget(const ProcessId& id, CudaState before) : ProcessId(id), initial(before) {}
  JournalTarget(Pid number, std::uint64_t start, CudaState before)
      : JournalTarget(ProcessId{number, start}, before) {}

  CudaState initial = CudaState::kRunning;  // what recovery brings it back to
};

struct JournalRecord {
  RecordedOperation operation;
  Pid root;
  ProcessId owner;    // the process that does it; an earlier Stasis left its start out
  std::string image;  // directory of the image, if the operation has one
  std::vector<JournalTarget> targets;
  // The criu at work: it outlives a killed tool until it misses the tool's answer.
  std::optional<ProcessId> criu = {};
  // Not empty: the image is complete, and the tool tells CRIU to end this tree. As soon as one of
  // the processes has ended there is no way back, and recovery ends the rest too.
  std::vector<ProcessId> ending = {};
  // Processes without CUDA of which a thread makes remote system calls (remote_syscall.h).
  std::vector<ProcessId> remote_calls = {};
  // `owner` is a `stasis recover` of what was cut short.
  bool recovered = false;
  // The GPU map that a resume was given ("0=1"), which finishing it needs; empty: none.
  std::string gpu_map = {};
  // CRIU takes what is not yet read of terminals, and does not write it back.
  bool takes_unread = false;
};

// The program that does the operation, as a user calls it: "stasis dump", "criu dump".
std::string command_name(const RecordedOperation& operation);
// The program at work on the record: "stasis dump", or "stasis recover".
std::string worker_name(const JournalRecord& record);
// kBusy: says that this program is at work on `pid`, and what to do.
Error busy(const JournalRecord& record, Pid pid);
inline constexpr const char* kWaitForIt = "wait for it to end, or interrupt it";
// The same of any `tool`, as a sentence names it, with that number. One that is stopped has to be
// let go on before the `remedy`.
Error busy_with(const std::string& tool, Pid number, Pid pid,
                const std::string& remedy = kWaitForIt);

struct TreeMember;
// The targets of a group: its CUDA processes with the state to bring them back to.
std::vector<JournalTarget> journal_targets(const std::vector<TreeMember>& members);

// /run/stasis for root, else $XDG_RUNTIME_DIR/stasis, else /tmp/stasis-<uid>; $STASIS_STATE_DIR
// before all. Made with mode 0700; kNotPermitted if it belongs to another user.
Result<std::string> journal_directory();
// The same of a directory in it.
Result<std::string> journal_subdirectory(const std::string& name);

// What tells the numbers of our PID namespace from those of others in the names of files in that
// directory, which several may share ("@4026532510"); nothing in the machine's first one.
std::string pid_namespace_mark();

class Journal {
 public:
  // Takes the target for this operation. kBusy, naming the holder, if another one has it, and if a
  // killed dump was about to end it, which only recovery can finish. What another killed operation
  // on the same root has left is kept: see inherited(). A resume begins also where the state
  // directory is full, see unwritten(): it leads to programs that run, and a suspended program must
  // not depend on the room there.
  static Result<Journal> begin(JournalRecord record);
  // Takes over the record of an operation on `root` that was killed, as it stands now. Nothing if
  // there is none any more: another tool has recovered it meanwhile. kBusy likewise.
  static Result<std::optional<Journal>> adopt(Pid root);

  Journal(Journal&&) noexcept = default;
  Journal& operator=(Journal&&) noexcept = default;

  const JournalRecord& record() const { return record_; }
  // The targets of a killed operation on the same root that were not recovered: their `initial` is
  // the state they had before that one, which is where a roll-back should lead.
  const std::vector<JournalTarget>& inherited() const { return left_.targets; }
  // No room for the record, so that `stasis recover --all` knows nothing of it if it is killed.
  bool unwritten() const { return unwritten_; }
  // That operation; Operation::kNone if there was none.
  const JournalRecord& left() const { return left_; }

  // Replaces the record, with all targets, before any of them is touched. kBusy if an operation on
  // another root has one of them. Durable against our own death, not against loss of power (the
  // targets would not survive that either).
  Result<void> update(const std::vector<JournalTarget>& targets);
  // The part of the record that is about CRIU, written before the tool tells CRIU anything.
  Result<void> note_criu(ProcessId criu, bool takes_unread);
  Result<void> note_ending(std::vector<ProcessId> tree);
  Result<void> note_remote_calls(std::vector<ProcessId> processes);
  // The image that the record names has proven wrong: recovery does not try it again.
  Result<void> forget_image();
  // The operation is over and its targets are well: removes the record, but for inherited targets
  // that were none of its own.
  void finish();

 private:
  Journal(UniqueFd lock, std::string path, JournalRecord record)
      : lock_(std::move(lock)), path_(std::move(path)), record_(std::move(record)) {}
  // Inherited targets that are not among `targets`.
  std::vector<JournalTarget> unclaimed(const std::vector<JournalTarget>& targets) const;
  Result<void> write(const std::vector<JournalTarget>& targets) const;
  UniqueFd lock_;
  std::string path_;
  JournalRecord record_;
  JournalRecord left_;  // by a killed operation
  bool unwritten_ = false;
};

struct JournalEntry {
  JournalRecord record;
  bool under_way = false;  // an operation holds it; not to be touched
};

// kBusy, naming the holder, if an operation under way has one of `targets`, or acts on the tree
// below it. A probe, which asks the driver nothing: the driver keeps a tool that asks about a
// process waiting until what goes on with that process is over (driver 580).
Result<void> check_not_busy(const std::vector<JournalTarget>& targets);

// Removes what tools have left in the state directory that were killed while they wrote there: half
// a record, a lock without one. What an operation holds is left alone.
void sweep_journal();

// All records there are. Unreadable ones are left out.
Result<std::vector<JournalEntry>> read_journal();
// The same of another PID namespace: by its mark, and by the state directory there, as it is seen
// from here.
Result<std::vector<JournalEntry>> read_journal_in(const std::string& directory,
                                                  const std::string& mark);

// The root of an operation, not under way any more, that has left this process behind among its
// targets.
std::optional<Pid> left_behind_with(const std::vector<JournalEntry>& entries,
                                    const ProcessId& process);

// An operation that was killed in another PID namespace whose tools share our state directory, as
// those of a container may: only a tool there recovers it, as the numbers are of there.
struct CutShortElsewhere {
  RecordedOperation operation;
  Pid seen;  // a process in that namespace, by its number here; 0: none is seen
};
std::vector<CutShortElsewhere> cut_short_elsewhere();

}  // namespace stasis
