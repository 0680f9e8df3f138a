// Host memory in one dump: copied while the job runs, found and kept from CRIU once it stands
// still, and saved while CRIU works (host_memory.h). Where that cannot be, CRIU saves it, and the
// user is told why.
//
// Private to src/operations. Not thread-safe; has threads of its own while it finds and saves,
// which end with it.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "base/interrupt.h"
#include "base/phases.h"
#include "base/scope_guard.h"
#include "operations/host_memory.h"
#include "operations/operations.h"

namespace stasis {

class HostMemoryDump {
 public:
  // The references outlive it.
  HostMemoryDump(const Environment& env, const DumpOptions& options)
      : env_(env), options_(options) {}

  // The base, before anything is touched. Errors of open_host_base().
  Result<void> open_base();
  // What criu is started with; nullptr if nothing can be kept from it.
  InsideCriu* inside_criu() { return inside_criu_ ? &*inside_criu_ : nullptr; }
  // Where it goes; `bytes`: about what the whole image takes. Before criu is started. While the job
  // runs, if it goes on after the dump.
  Result<void> precopy(const ProcessTree& tree, const UniqueFd& image_dir, ContentOptions options,
                       std::uint64_t bytes, Phases& phases);
  // The tree is suspended, and CRIU waits. Begins to look for what CRIU would move with one thread,
  // and to save it.
  Result<void> begin(ProcessTree& tree, const UniqueFd& image_dir, const Criu& criu);
  // CRIU has written all that it has to. Waits for the end; the record, if anything was saved.
  Result<std::optional<ContentRecord>> finish(const Criu& criu, Phases& phases);
  // An earlier image may have some of it.
  bool has_base() const { return base_ != nullptr; }

  // Of an image that is not to be: asks for the end, and waits until no process of the tree is
  // written into any more.
  void request_stop();
  // Waits for the end.
  void stop();

  std::uint64_t reused_bytes() const { return memory_.reused_bytes(); }
  std::uint64_t precopied_bytes() const { return memory_.precopied_bytes(); }
  // HostMemory::give_back_room()
  void give_back_room() { memory_.give_back_room(); }

 private:
  bool may_hide() const { return inside_criu_ && options_.host_memory != HostMemoryWay::kCriu; }
  bool find() { return memory_.find(options_.host_memory == HostMemoryWay::kParallel); }
  Result<bool> hide();
  Result<void> leave_to_criu(const UniqueFd& image_dir, const std::string& why);
  void wait_until_stopped() const;

  const Environment& env_;
  const DumpOptions& options_;
  std::shared_ptr<const ContentBase> base_;
  std::optional<InsideCriu> inside_criu_;
  ContentOptions into_;
  HostMemory memory_;
  Interrupt stop_;
  std::atomic<bool> all_stand_still_ = false;
  // End before what they need. Whether anything is kept from criu; kNotSupported: why not.
  std::shared_future<Result<bool>> hiding_;
  std::future<Result<void>> saving_;
  // Also should an exception end us, which would wait for it for ever.
  ScopeGuard<std::function<void()>> end_saving_{[this] { stop_.request(SIGTERM); }};
};

}  // namespace stasis
