// The descriptors of another process: how many more it may have, and copies of them. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis::proc {

struct DescriptorLimit {
  std::uint64_t limit = 0;  // the soft one of RLIMIT_NOFILE: numbers below it may be given out
  std::uint64_t hard = 0;   // to which it may be raised; the same if it cannot be told
  std::uint64_t spare = 0;  // of those, the ones that are free
};

// A command that gives the process well more descriptors than it may have. It sets the soft limit
// alone where that is enough: only root raises a hard one that was lowered.
std::string raise_command(Pid pid, const DescriptorLimit& limit);

// Nothing for a process that is gone, has no limit, or may not be examined. `proc` is "/proc" but
// in tests.
std::optional<DescriptorLimit> descriptor_limit(Pid pid, const std::string& proc = "/proc");

bool is_no_socket(const struct stat& info);
// What drivers hand out for memory: a device, or a file, also one without a name. To close another
// kind may wait for what the process has made of it.
bool may_be_memory(const struct stat& info);

// A copy, with the rights that the process has by it: one that it may only read is not for writing,
// which it would be for root if it were opened anew. By number: a caller that must have it of one
// address space looks afterwards whether the process still runs in that. kNotSupported of a file
// that a program serves (served_files.h): to close it would wait for that. And of what `accept`
// refuses, before it is copied and after: what is accepted and no socket is closed as any other.
Result<UniqueFd> take_descriptor(Pid pid, const Pidfd& process, int number,
                                 const FileCheck& accept = &is_no_socket);
// The same without these looks, which take 0.3 ms: of what is the kernel's own, as its link in
// /proc/PID/fd says that has no path ("socket:[1]", "pipe:[2]", "anon_inode:[eventpoll]"). For
// DroppedCopies: the process may have put a socket there.
Result<UniqueFd> take_nameless(Pid pid, const Pidfd& process, int number);

// Where copies are put that may be of a socket: the process may have closed its own by then, and
// close(2) of the last one waits as long as its program has said (SO_LINGER). A process that ends
// does not wait: those that would wait are left to a child, many together.
class DroppedCopies {
 public:
  DroppedCopies() = default;
  DroppedCopies(const DroppedCopies&) = delete;
  DroppedCopies& operator=(const DroppedCopies&) = delete;
  ~DroppedCopies() { let_go(); }
  // Any file; what does not linger is closed at once.
  void add(UniqueFd copy);

 private:
  void let_go();

  std::vector<UniqueFd> lingering_;
};
// One alone.
void drop(UniqueFd copy);

}  // namespace stasis::proc
