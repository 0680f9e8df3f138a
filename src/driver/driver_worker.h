// Processes in which a driver's calls are made, one at a time each, and the one that forks them.
//
// Private to src/driver. Callers and CallerSource are used by one thread at a time.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "base/fd.h"
#include "driver/driver.h"
#include "proc/procfs.h"

namespace stasis {

// What goes over a socket between two processes of one program, so as it lies in memory.
struct CallRequest {
  static constexpr std::size_t kMostPairs = 128;
  enum class Kind : std::uint32_t { kAction, kPrepareRestore };
  Kind kind = Kind::kAction;
  Action action = Action::kGetState;
  std::int32_t pid = 0;
  std::uint32_t pair_count = 0;
  std::int64_t timeout_ms = 0;
  std::array<GpuPair, kMostPairs> pairs{};
};
static_assert(std::is_trivially_copyable_v<CallRequest>);

struct CallAnswer {
  std::int32_t cu_result = 0;
  std::int32_t value = 0;  // a state, or a thread's number
};

// One of those processes. Killed with its handle.
class Caller {
 public:
  Caller(Pidfd process, UniqueFd socket)
      : process_(std::move(process)), socket_(std::move(socket)) {}
  Caller(Caller&&) noexcept = default;
  Caller& operator=(Caller&&) noexcept = default;
  ~Caller() { kill(); }

  bool send(const CallRequest& request) const;
  // Nothing if there is none yet; `gone` if there never will be one.
  std::optional<CallAnswer> wait(std::chrono::milliseconds timeout, bool& gone) const;
  // And waits until nothing of it is left.
  void kill();
  // It ends by itself, soon; only while it has nothing to do.
  void let_go() { socket_.reset(); }

  bool initialised = false;  // has the driver initialised for a restore

 private:
  Pidfd process_;
  UniqueFd socket_;
};

// Forks the callers. It is forked itself, at the start, while there is one thread: what other
// threads hold at the moment of a fork would be held for ever in the child.
class CallerSource {
 public:
  static Result<CallerSource> start(Driver& driver);
  // By a program of ours: bound_driver_by(). kIo if it cannot be started.
  static Result<CallerSource> start_program(const std::string& program, const std::string& library);
  CallerSource(CallerSource&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)), socket_(std::move(other.socket_)) {}
  CallerSource& operator=(CallerSource&&) = delete;
  // Its end, and that of all callers.
  ~CallerSource();

  Result<Caller> make() const;

 private:
  CallerSource(int pid, UniqueFd socket);
  int pid_ = 0;
  UniqueFd socket_;
};

}  // namespace stasis
