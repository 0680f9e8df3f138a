// SPDX-License-Identifier: GPL-2.0-or-later
// One restore: what the image needs is checked before a process exists, and what CRIU has made is
// given its GPUs back before any of its threads runs. On criu's main thread.
#pragma once

#include <memory>
#include <optional>
#include <set>

#include "checkpoint/journal.h"
#include "driver/driver.h"
#include "gpu_record.h"

namespace stasis::plugin {

class RestoreSession {
 public:
  // The errors are reasons why this image cannot be restored here.
  static Result<std::unique_ptr<RestoreSession>> begin(std::shared_ptr<Driver> driver,
                                                       std::optional<GpuRecord> record);

  // The hook. CRIU ignores what it returns, so on a failure the tasks are killed, which makes CRIU
  // fail. The first call does it for the whole tree.
  int resume(Pid pid);

 private:
  RestoreSession(std::shared_ptr<Driver> driver, std::optional<GpuRecord> record)
      : driver_(std::move(driver)), record_(std::move(record)) {}
  Result<void> plan();
  Result<void> resume_tree(Pid root);
  CudaState wanted(Pid pid) const;

  std::shared_ptr<Driver> driver_;
  std::optional<GpuRecord> record_;
  std::vector<GpuPair> pairs_;
  std::set<GpuUuid> targets_;  // the GPUs that it comes back to
  std::vector<Pid> known_;     // of the trees that are done
  std::vector<Pid> cuda_;
  bool failed_ = false;
  std::optional<Journal> journal_;  // of the tree that is being restored
};

}  // namespace stasis::plugin
