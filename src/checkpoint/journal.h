// What we are about to do to whom, written down before it is done, so that `stasis recover` can
// bring the targets of a killed operation back.
//
// One file per target tree under the state directory: JSON, replaced as a whole. Whoever holds the
// lock on its `.lock` file is the operation under way; the kernel drops that lock when the holder
// dies, however it dies. One thread at a time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "proc/procfs.h"
#include "stasis/cuda_state.h"
#include "stasis/ids.h"
#include "stasis/result.h"

namespace stasis {

struct JournalTarget {
  Pid pid;
  std::uint64_t start_ticks = 0;  // 0: not known yet (a restore before CRIU made the process)
  CudaState initial = CudaState::kRunning;  // what recovery brings it back to
};

struct JournalRecord {
  std::string operation;  // "suspend", "resume", "dump", "restore"
  Pid root;
  Pid owner;          // the process that does it, for messages
  std::string image;  // directory of the image, if the operation has one
  std::vector<JournalTarget> targets;
};

// /run/stasis for root, else $XDG_RUNTIME_DIR/stasis, else /tmp/stasis-<uid>; $STASIS_STATE_DIR
// before all. Made with mode 0700; kNotPermitted if it belongs to somebody else.
Result<std::string> journal_directory();

class Journal {
 public:
  // Takes the target for this operation. kBusy, naming the holder, if another one has it.
  static Result<Journal> begin(JournalRecord record);
  // Takes over the record of an operation that was killed, as it stands. kBusy likewise.
  static Result<Journal> adopt(JournalRecord record);

  Journal(Journal&&) noexcept = default;
  Journal& operator=(Journal&&) noexcept = default;

  // Replaces the record, with all targets, before any of them is touched. kBusy if an operation on
  // another root has one of them. Durable against our own death, not against loss of power (the
  // targets would not survive that either).
  Result<void> update(const std::vector<JournalTarget>& targets);
  // Removes the record: the operation is over and nobody is left behind.
  void finish();

 private:
  Journal(UniqueFd lock, std::string path, JournalRecord record)
      : lock_(std::move(lock)), path_(std::move(path)), record_(std::move(record)) {}
  UniqueFd lock_;
  std::string path_;
  JournalRecord record_;
};

struct JournalEntry {
  JournalRecord record;
  bool under_way = false;  // somebody holds it; not to be touched
};

// All records there are. Unreadable ones are left out.
Result<std::vector<JournalEntry>> read_journal();

}  // namespace stasis
