#include "precopy.h"

#include <cerrno>
#include <chrono>

#include "abi/futex.h"

namespace stasis::preload {

using direct::PrecopyState;

namespace {

// The mover lets go within some 10 ms, unless the driver hangs.
constexpr std::chrono::seconds kWaitAtMost{10};
constexpr std::chrono::milliseconds kPoll{20};

std::atomic<std::atomic<PrecopyState>*> g_word{nullptr};

}  // namespace

void heed_precopy(std::atomic<PrecopyState>* word) { g_word.store(word); }

void wait_for_precopy() {
  auto* word = g_word.load(std::memory_order_relaxed);
  if (!word || word->load(std::memory_order_acquire) == PrecopyState::kNo) [[likely]]
    return;
  const int error = errno;
  auto copies = PrecopyState::kCopies;
  word->compare_exchange_strong(copies, PrecopyState::kEnds);
  const auto deadline = std::chrono::steady_clock::now() + kWaitAtMost;
  while (word->load(std::memory_order_acquire) == PrecopyState::kEnds &&
         std::chrono::steady_clock::now() < deadline)
    futex::wait(*word, PrecopyState::kEnds, true, kPoll);
  errno = error;
}

void end_precopy() {
  auto* word = g_word.load(std::memory_order_relaxed);
  if (word && word->exchange(PrecopyState::kNo) == PrecopyState::kEnds)
    futex::wake_all(*word, true);
}

}  // namespace stasis::preload
