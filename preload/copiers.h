// Threads of the agent's that copy beside its own. One thread copies 4 GiB of managed memory a
// second out of a GPU, because most of the time goes into memory of the host's that nothing has
// touched yet; eight copy 25 (H100).
//
// They sleep but for that, and make no call of the driver then. They are named as the agent's own
// thread is, by which the tool knows which threads not to park.
#pragma once

#include <cstddef>
#include <functional>

#include "driver_calls.h"
#include "eviction.h"

namespace stasis::preload {

// What is copied at once; on one side all of it.
inline constexpr std::size_t kManagedBlock = std::size_t{2} << 20;

// Pinned memory of a block's size, which the device copies four to eight times as fast to and from
// as memory that is not (H100). Where none is to be had, other memory does.
class Bounce {
 public:
  Bounce() = default;
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;

  // What is there, in the pinned memory.
  Outcome out(cuda::CUdeviceptr from, std::size_t bytes, const std::byte*& found);
  Outcome in(cuda::CUdeviceptr to, const std::byte* from, std::size_t bytes);
  void let_go();

 private:
  bool have();

  bool pinned_ = false;
  std::byte* at_ = nullptr;
};

class Copiers {
 public:
  // Once in a process. While the program's threads run: a thread is started with locks of the C
  // library, which one that is parked may hold.
  static void start();
  // In a forked child, which has none of them.
  static void forget();

  using Act = std::function<Outcome(std::size_t index, Bounce& bounce)>;
  // Calls `act` for each index below `count`, in any order, by the agent's thread and all others,
  // with `context` current. The first failure ends it. By the agent's thread alone.
  static Outcome run(std::size_t count, cuda::CUcontext context, const Act& act);
  // The pinned memory, with a context current.
  static void let_go();
};

}  // namespace stasis::preload
