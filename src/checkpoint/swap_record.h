// What a whole swap is about, written down before either of its programs is touched, so that
// `stasis recover --all` can bring both to what they were, or to what was asked for, after the swap
// was killed between the suspend of the one and the resume of the other. Each part has a record of
// its own besides (journal.h), in the namespaces of its program.
//
// One thread at a time.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "proc/process_id.h"

namespace stasis {

// One program of a swap, as the process that swaps sees it.
struct SwapParty {
  std::string name;  // as the user gave it: a number, or the name of a job
  ProcessId root;    // of its tree, or the init of its job's PID namespace
};

struct SwapRecord {
  ProcessId owner;  // the process that does it; an earlier Stasis left its start out
  SwapParty out;
  SwapParty in;
  std::string gpu_map;  // of the resume, as the user gave it; empty: none
};

class SwapJournal {
 public:
  // kBusy if another swap of the same two is under way. Replaces what a killed one has left.
  static Result<SwapJournal> begin(SwapRecord record);
  // Takes over what a killed swap has left. Nothing if that is no more.
  static Result<std::optional<SwapJournal>> adopt(const SwapRecord& record);

  SwapJournal(SwapJournal&&) noexcept = default;
  SwapJournal& operator=(SwapJournal&&) noexcept = default;

  const SwapRecord& record() const { return record_; }
  // Both programs are in a state that the user knows of.
  void finish();

 private:
  SwapJournal(UniqueFd lock, std::string path, SwapRecord record)
      : lock_(std::move(lock)), path_(std::move(path)), record_(std::move(record)) {}
  UniqueFd lock_;
  std::string path_;
  SwapRecord record_;
};

struct SwapEntry {
  SwapRecord record;
  bool under_way = false;
};

// All there are. Unreadable ones are left out.
Result<std::vector<SwapEntry>> read_swaps();

// The user has decided about one of the two by a command of its own: removes the record of a killed
// swap of that process.
void forget_swaps_of(const ProcessId& root);

// Is it the name of a record of a swap in our PID namespace?
bool is_our_swap(std::string_view name);

}  // namespace stasis
