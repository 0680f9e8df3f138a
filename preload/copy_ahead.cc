#include "copy_ahead.h"

#include <cerrno>
#include <chrono>

#include "abi/futex.h"

namespace stasis::preload {

using direct::CopiedAhead;

namespace {

// The mover lets go within some 10 ms, unless the driver hangs.
constexpr std::chrono::seconds kWaitAtMost{10};
constexpr std::chrono::milliseconds kPoll{20};

std::atomic<std::atomic<CopiedAhead>*> g_word{nullptr};

std::atomic<std::uint32_t>& as_futex(std::atomic<CopiedAhead>& word) {
  return reinterpret_cast<std::atomic<std::uint32_t>&>(word);
}

}  // namespace

void heed_copy_ahead(std::atomic<CopiedAhead>* word) { g_word.store(word); }

void wait_for_copy_ahead() {
  auto* word = g_word.load(std::memory_order_relaxed);
  if (!word || word->load(std::memory_order_acquire) == CopiedAhead::kNo) [[likely]]
    return;
  const int error = errno;
  auto copies = CopiedAhead::kCopies;
  word->compare_exchange_strong(copies, CopiedAhead::kEnds);
  const auto deadline = std::chrono::steady_clock::now() + kWaitAtMost;
  while (word->load(std::memory_order_acquire) == CopiedAhead::kEnds &&
         std::chrono::steady_clock::now() < deadline)
    futex::wait(as_futex(*word), static_cast<std::uint32_t>(CopiedAhead::kEnds), true, kPoll);
  errno = error;
}

void end_copy_ahead() {
  auto* word = g_word.load(std::memory_order_relaxed);
  if (word && word->exchange(CopiedAhead::kNo) == CopiedAhead::kEnds)
    futex::wake_all(as_futex(*word), true);
}

}  // namespace stasis::preload
