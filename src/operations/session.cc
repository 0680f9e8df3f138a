#include "operations/session.h"

#include <utility>

#include "direct/mover_request.h"

namespace stasis {

void OperationSession::add_mover(std::shared_ptr<direct::MoverProcess> mover) {
  if (mover) movers_.push_back(std::move(mover));
}

Result<std::unique_ptr<Driver>> OperationSession::load_driver(Movers movers) {
  const std::string cache = movers == Movers::kDigests ? compiled_code_directory() : std::string();
  const auto start = [&]() -> std::shared_ptr<direct::MoverProcess> {
    auto started = direct::MoverProcess::start(cache);
    return started ? std::make_shared<direct::MoverProcess>(std::move(*started)) : nullptr;
  };
  auto spare = movers == Movers::kSpare || movers == Movers::kDigests ? start() : nullptr;
  if (movers != Movers::kNone) add_mover(start());
  add_mover(std::move(spare));
  auto driver = stasis::load_driver();
  if (!driver || !timeouts) return driver;
  auto bounded = bound_driver(*driver, *timeouts);
  if (bounded) return bounded;
  note_("calls of the driver may take for ever: " + bounded.error().message);
  return driver;
}

Environment OperationSession::environment(Driver& driver) {
  return {driver,
          interrupt_,
          progress_,
          note_,
          [this](const MoverRequest& needs) { return make_mover(needs); },
          [this] {
            if (!movers_.empty()) (void)movers_.front()->end();
          },
          ring_bytes};
}

Result<std::shared_ptr<direct::MemoryMover>> OperationSession::make_mover(
    const MoverRequest& needs) {
  const auto is_lost = [this] { return movers_.front()->is_lost(); };
  if (movers_.size() > 1 && is_lost()) movers_.pop_front();
  if (start_ && (movers_.empty() || is_lost())) {
    STASIS_TRY_ASSIGN(auto started, start_());
    movers_ = {std::move(started)};
  }
  if (movers_.empty()) return fail(ErrorCode::kInternal, "no mover process could be started");
  const auto silence = timeouts ? timeouts->work : std::chrono::milliseconds(0);
  auto ready = prepare_mover(*movers_.front(), needs, ring_bytes, silence, interrupt_);
  if (ready) return movers_.front();
  // Another can be had.
  if (start_) movers_.clear();
  return fail(std::move(ready.error()));
}

}  // namespace stasis
