// A driver whose calls come to an end: each is made in a process of its own kind, which is killed
// when there is no answer in time.
// A call of the driver waits for the target for ever (580.159.04: one to a process that hangs or is
// stopped, or that another tool's call is about), and a thread that is stuck in one can neither be
// cancelled nor be left behind: it would lock or restore the target when no tool expects that any
// more. What a killed caller had asked for the driver drops (`killed_locker` of tests/conformance).
//
// One process without threads of its own forks the callers, and both end with us, however we end.
// A call costs some 0.03 ms more than the driver's own. docs/adr/0011-calls-that-end.md.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/result.h"
#include "driver/driver.h"

namespace stasis {

struct DriverTimeouts {
  // For what the driver answers at once, and for an unlock; a lock takes its own time besides.
  std::chrono::milliseconds answer{10000};
  // For a checkpoint or a restore, which take as long as they take, without any sign of work in the
  // target: processor time, or memory that comes or goes.
  std::chrono::milliseconds work{60000};
};

// Zero waits for ever. To be called while this process has one thread, because it forks. A call
// that was given up is a DriverFailure with kDriverNoAnswer. Where no more processes are to be had,
// calls are made in this one, without a limit: a job must not stay locked for that. `driver` is
// taken only if all went well.
Result<std::unique_ptr<Driver>> bound_driver(std::unique_ptr<Driver>& driver,
                                             const DriverTimeouts& timeouts);

// The same where there may be threads, and a driver in use, of which a fork would copy half: the
// callers are forked by `program`, which is started anew with `library` as its argument (empty:
// as load_driver takes it) and does nothing but serve_driver_calls().
Result<std::unique_ptr<Driver>> bound_driver_by(const std::string& program,
                                                const std::string& library,
                                                std::unique_ptr<Driver>& driver,
                                                const DriverTimeouts& timeouts);
// That program's work, until the process that has started it is gone.
[[noreturn]] void serve_driver_calls(Driver& driver);

}  // namespace stasis
