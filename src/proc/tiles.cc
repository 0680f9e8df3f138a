#include "proc/tiles.h"

#include <sys/ptrace.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include <fmt/format.h>

#include "abi/processor_state.h"
#include "base/obstacle.h"
#include "proc/procfs.h"

namespace stasis::proc {

bool has_tiles(Tid thread) {
  namespace state = processor_state;
  std::array<std::uint64_t, state::kInUseAt / 8 + 1> words{};
  iovec part{words.data(), sizeof words};
  return ::ptrace(PTRACE_GETREGSET, thread.value, reinterpret_cast<void*>(state::kNote), &part) ==
             0 &&
         part.iov_len == sizeof words && (words.back() & state::kTiles) != 0;
}

std::vector<Tid> stopped_threads_with_tiles(Pid pid) {
  std::vector<Tid> threads = ProcFs().threads(pid);
  std::erase_if(threads, [](Tid thread) { return !has_tiles(thread); });
  return threads;
}

Error refusal_of_tiles(Pid pid, const std::vector<Tid>& threads) {
  Error error = refusal(
      {"amx-tiles", Severity::kRed, pid,
       fmt::format("process {} is in the middle of a computation with AMX (thread {}{}), and CRIU "
                   "does not save its tiles",
                   pid.value, threads.front().value,
                   threads.size() > 1 ? fmt::format(" and {} more", threads.size() - 1) : ""),
       "dump once more; if that is always so, have the program release its tiles (_tile_release) "
       "when it has computed, or run without AMX (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16)"},
      ErrorCode::kBusy);
  // Between two computations there are none.
  error.retry = Retry::kSame;
  return error;
}

}  // namespace stasis::proc
