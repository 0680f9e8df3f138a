// SPDX-License-Identifier: GPL-2.0-or-later
// One dump: the tree is locked while it runs, checkpointed while CRIU holds it, and brought back to
// what it was before if it is to live on. On criu's main thread.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "driver/driver.h"

namespace stasis::plugin {

class DumpSession {
 public:
  explicit DumpSession(std::shared_ptr<Driver> driver);
  ~DumpSession();
  DumpSession(const DumpSession&) = delete;
  DumpSession& operator=(const DumpSession&) = delete;

  // The hooks. 0, -ENOTSUP for a process without CUDA, -1 if the dump has to fail. The first call
  // of each does it for the whole tree.
  int pause(Pid pid);
  int checkpoint(Pid pid);
  // CRIU is about to let the tree go: `failed`, or to do with it what the user asked for.
  void finish(bool failed);
  // CRIU ends, or begins something else. A process that lives although CRIU meant to end it,
  // because the user's script had failed, is brought back now.
  void settle();

 private:
  struct State;  // shared with calls of the driver that have not come back
  Result<void> bring_agents();
  Result<void> lock_tree();
  Result<void> checkpoint_tree();
  Result<void> record_image();
  void order_sockets();
  Result<void> roll_back();
  void wait_for_agents();
  void unlock_one_by_one();
  std::string behind_gates();
  int answer(Pid pid) const;

  std::shared_ptr<State> state_;
  std::optional<Pid> root_;
  bool locked_ = false;
  std::optional<bool> checkpointed_;
  bool should_die_ = false;
};

}  // namespace stasis::plugin
