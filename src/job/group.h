// The other parts of a job of several nodes, each of which a `stasis run` looks after on its node:
// they start, are restored, and are saved together (docs/groups.md).
//
// In one directory that all of them see each such operation has a directory of its own, in which
// the workers agree (group/group_part.h), and which is there for as long as the operation is
// under way: so a supervisor sees that another part has begun a save.
//
// Values and functions; any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/interrupt.h"
#include "base/result.h"
#include "group/group_part.h"

namespace stasis::job {

struct JobGroup {
  std::string dir;  // for one start of the job alone; empty: it is a job of one node
  std::uint32_t parts = 1;
  std::string part;

  bool has_others() const { return !dir.empty(); }
};

// Makes the directory, if it is not there, and its path one that is found from anywhere. What
// GroupDirectory::open() says; kUsage.
Result<void> open_group(JobGroup& group);
// When the job ends here: the last part removes it. Failures are ignored.
void leave_group(const JobGroup& group);

// What parts do together.
enum class Together {
  kStart,    // the program, or its restore
  kSave,     // and let the job go on
  kSaveEnd,  // and end the job
};

// Whether another part has begun it, and it is not decided yet.
bool is_begun(const JobGroup& group, Together what);

// As GroupPart::join(). `interrupt` must outlive the part.
Result<std::unique_ptr<GroupPart>> join(const JobGroup& group, Together what,
                                        GroupPartOptions options, const Interrupt& interrupt);

// Waits until all parts have come that begin the program anew. kUsage where one goes on from an
// image; kTimeout.
Result<void> start_together(const JobGroup& group, std::chrono::milliseconds timeout,
                            const Interrupt& interrupt);

}  // namespace stasis::job
