// What one caller's operations share: what may stop them, where they tell what, and the process
// that copies GPU memory. Made once by each program that carries operations out.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "direct/environment.h"
#include "direct/mover_process.h"
#include "driver/bounded_driver.h"

namespace stasis {

// Not copied: an environment refers to it. One thread at a time.
class OperationSession {
 public:
  using Note = std::function<void(const std::string&)>;
  using StartMover = std::function<Result<std::shared_ptr<direct::MoverProcess>>()>;

  // All must outlive this.
  OperationSession(const Interrupt& interrupt, Progress& progress, Note note)
      : interrupt_(interrupt), progress_(progress), note_(std::move(note)) {}
  OperationSession(const OperationSession&) = delete;
  OperationSession& operator=(const OperationSession&) = delete;

  // Of its memory to copy through, for each GPU.
  std::uint64_t ring_bytes = direct::MoverOptions().ring_bytes;
  // How long the driver and a mover may be silent; none: for ever.
  std::optional<DriverTimeouts> timeouts = DriverTimeouts{};

  enum class Movers {
    kNone,
    kOne,
    kSpare,    // a second one, should the first be lost while the programs are as they were
    kDigests,  // likewise, as computing digests may break it (MemoryMover::prepare_digests())
  };
  // Starts idle movers, and then loads the driver, whose calls end after `timeouts`. Forks: while
  // this process has one thread. kDriverMissing, kDriverTooOld.
  Result<std::unique_ptr<Driver>> load_driver(Movers movers);

  // Idle until it is needed. A further one takes its place if it is lost.
  void add_mover(std::shared_ptr<direct::MoverProcess> mover);
  // Where none is left, one is started when it is needed.
  void start_movers_by(StartMover start) { start_ = std::move(start); }
  void drop_movers() { movers_.clear(); }

  // `driver` must outlive it, too.
  Environment environment(Driver& driver);

 private:
  Result<std::shared_ptr<direct::MemoryMover>> make_mover(const MoverRequest& needs);

  const Interrupt& interrupt_;
  Progress& progress_;
  Note note_;
  std::deque<std::shared_ptr<direct::MoverProcess>> movers_;
  StartMover start_;
};

}  // namespace stasis
