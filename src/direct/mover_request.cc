#include "direct/mover_request.h"

#include <span>

#include "checkpoint/journal.h"

namespace stasis {

std::string compiled_code_directory() {
  auto directory = journal_subdirectory("compiled");
  return directory ? std::move(*directory) : std::string();
}

Result<void> prepare_mover(direct::MoverProcess& mover, const MoverRequest& needs,
                           std::uint64_t ring_bytes, std::chrono::milliseconds silence,
                           const Interrupt& interrupt) {
  auto options = direct::options_for(needs.brings_back ? std::span<const GpuUuid>() : needs.gpus,
                                     ring_bytes, needs.bytes);
  options.silence = silence;
  const auto deadline = Clock::now() + needs.timeout;
  return needs.contexts ? mover.prepare(options, needs.gpus, interrupt, deadline)
                        : mover.start_driver(options, interrupt, deadline);
}

}  // namespace stasis
