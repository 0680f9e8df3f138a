// SPDX-License-Identifier: GPL-2.0-or-later
// cuda_plugin.so: what CRIU calls, and when. No exception and no print leaves this file.
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <memory>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/scope_guard.h"
#include "base/version.h"
#include "begun_threads.h"
#include "checkpoint/inherited_files.h"
#include "criu_api.h"
#include "dump_session.h"
#include "restore_session.h"

extern "C" {
#include <criu/criu-plugin.h>
}

namespace stasis::plugin {
namespace {

// What one operation of CRIU needs. Never destroyed: a call of the driver that has not come back
// may use it to the end of criu.
struct Current {
  std::optional<Error> no_driver;  // why there is no session for this dump
  std::unique_ptr<DumpSession> dump;
  std::unique_ptr<RestoreSession> restore;
};

Current& current() {
  static auto* const instance = new Current;
  return *instance;
}

// The driver's libraries leave threads in the process that calls them (cuInit does on driver
// 580.159.04), and a call that does not come back is one more. Such a thread shares its root and
// working directory with criu's own, and while it does the kernel refuses criu every mount
// namespace (setns: EINVAL), so that no container is saved. A thread may have both to itself.
// docs/adr/0035.
void part_from_other_threads() {
  if (::unshare(CLONE_FS) == 0) return;
  log_warning("criu may not be able to enter mount namespaces: " +
              errno_error("cannot part from the driver's threads", errno).to_string());
}

// An exception would go through C code of CRIU's.
template <class Act>
int guarded(int if_thrown, Act&& act) {
  const ScopeGuard parted(part_from_other_threads);
  try {
    return act();
  } catch (const std::exception& error) {
    log_error("cannot go on",
              Error{ErrorCode::kInternal, error.what(), "report this, with CRIU's log"});
    return if_thrown;
  }
}

void settle() {
  (void)guarded(0, [] {
    if (current().dump) current().dump->settle();
    return 0;
  });
}

int begin_dump() {
  auto driver = load_driver();
  if (!driver) {
    const bool missing = driver.error().code == ErrorCode::kDriverMissing;
    (missing ? log_info : log_warning)("processes with CUDA cannot be dumped here: " +
                                       driver.error().message + "; " + driver.error().remedy);
    current().no_driver = std::move(driver.error());
    return 0;
  }
  if ((*driver)->info().simulated) log_warning("this is the simulated GPU");
  avoid_freezer();
  current().dump = std::make_unique<DumpSession>(std::shared_ptr<Driver>(std::move(*driver)));
  static const bool registered = std::atexit(settle) == 0;
  (void)registered;
  return 0;
}

// Where there is no driver, a process that has the driver's files mapped cannot be saved. CRIU
// would say of the first such file that it does not know it, and not why.
int refuse_without_driver(Pid pid) {
  if (!current().no_driver) return -ENOTSUP;
  const auto mappings = proc::ProcFs().mappings(pid);
  const auto is_drivers = [](const auto& mapping) { return is_drivers_file(mapping.path, true); };
  if (!mappings || std::none_of(mappings->begin(), mappings->end(), is_drivers)) return -ENOTSUP;
  log_error(fmt::format("process {} uses CUDA and cannot be dumped", pid.value),
            *current().no_driver);
  return -1;
}

int begin_restore() {
  const Inventory inventory = probe_inventory();
  if (inventory == Inventory::kNotNamed) return 0;
  std::optional<GpuRecord> record;
  if (const auto directory = image_directory()) {
    auto read = read_record(*directory);
    if (!read) {
      log_error("this image cannot be restored", read.error());
      return -1;
    }
    record = std::move(*read);
  }
  const bool needed = inventory == Inventory::kNamed || record;
  auto driver = load_driver();
  if (!driver) {
    if (!needed) {
      log_warning("if the image holds GPU memory, it is not restored: " + driver.error().message);
      return 0;
    }
    log_error("this image holds GPU memory", driver.error());
    return -1;
  }
  if ((*driver)->info().simulated) log_warning("this is the simulated GPU");
  if (!needed && !record) log_info("the image does not say whether it holds GPU memory");
  auto session = RestoreSession::begin(std::shared_ptr<Driver>(std::move(*driver)), record);
  if (!session) {
    if (!needed) {
      log_warning("if the image holds GPU memory, it is not restored: " + session.error().message);
      return 0;
    }
    log_error("this image cannot be restored here", session.error());
    return -1;
  }
  current().restore = std::move(*session);
  if (const auto begun = wait_for_begun_threads(); !begun)
    log_warning("a container with a user namespace may hang: " + begun.error().to_string());
  return 0;
}

int init(int stage) {
  return guarded(-1, [stage] {
    // A criu that serves several requests may have had one before.
    settle();
    current().no_driver.reset();
    current().dump.reset();
    current().restore.reset();
    log_info(fmt::format("Stasis {}, stage {}", kVersion, stage));
    // A pre-dump copies memory while the tasks run on, with what they have on the GPU.
    if (stage == CR_PLUGIN_STAGE__DUMP) return begin_dump();
    if (stage == CR_PLUGIN_STAGE__RESTORE) return begin_restore();
    return 0;
  });
}

void fini(int stage, int result) {
  (void)guarded(0, [stage, result] {
    if (stage == CR_PLUGIN_STAGE__DUMP && current().dump) current().dump->finish(result != 0);
    return 0;
  });
}

int pause_devices(int pid) {
  return guarded(-1, [pid] {
    return current().dump ? current().dump->pause(Pid{pid}) : refuse_without_driver(Pid{pid});
  });
}

int checkpoint_devices(int pid) {
  if (!current().dump) return -ENOTSUP;
  return guarded(-1, [pid] { return current().dump->checkpoint(Pid{pid}); });
}

int resume_devices_late(int pid) {
  if (!current().restore) return -ENOTSUP;
  return guarded(-1, [pid] { return current().restore->resume(Pid{pid}); });
}

// What every CRIU from 4.0 on takes: it refuses a plugin that says a higher version, or more hooks,
// than it knows itself.
constexpr unsigned kVersionOfCriu40 = CRIU_PLUGIN_GEN_VERSION(0, 2, 0);
constexpr unsigned kHooksOfCriu40 = 12;

cr_plugin_desc_t describe() {
  cr_plugin_desc_t out{};
  out.name = kName;
  out.init = init;
  out.exit = fini;
  out.version = kVersionOfCriu40;
  out.max_hooks = kHooksOfCriu40;
  out.hooks[CR_PLUGIN_HOOK__PAUSE_DEVICES] = reinterpret_cast<void*>(pause_devices);
  out.hooks[CR_PLUGIN_HOOK__CHECKPOINT_DEVICES] = reinterpret_cast<void*>(checkpoint_devices);
  out.hooks[CR_PLUGIN_HOOK__RESUME_DEVICES_LATE] = reinterpret_cast<void*>(resume_devices_late);
  return out;
}

}  // namespace
}  // namespace stasis::plugin

// Declared with C linkage in the header.
cr_plugin_desc_t CR_PLUGIN_DESC = stasis::plugin::describe();
