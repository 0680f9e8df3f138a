// Contexts, and the current one of each thread.
//
// Ownership: a Context is never freed, only marked destroyed, so that a stale handle is told apart
// from garbage. Threads: the members say which lock guards them; the stack is each thread's own.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "sim/memory.h"
#include "sim/stream.h"

namespace stasis::sim {

struct Driver;
struct Module;

struct Context {
  int device = 0;  // ordinal
  unsigned flags = 0;
  bool primary = false;
  std::atomic<bool> destroyed{false};
  std::atomic<cuda::CUresult> failure{cuda::CUDA_SUCCESS};  // what all calls answer from then on
  std::atomic<bool> restored{false};    // by a restore of the process, and not made after it
  std::atomic<std::uint64_t> peers{0};  // devices whose memory it may use, besides its own
  std::array<std::atomic<std::size_t>, 3> limits{1024, 8650752, 8388608};  // by CUlimit

  // Guards the members below, and the order in which work reaches streams that wait for each other.
  std::mutex mutex;
  Stream default_stream;
  std::set<Stream*> streams;
  std::vector<Mark> of_destroyed;  // the ends of streams that are no more
  std::set<Event*> events;
  std::set<Module*> modules;

  // Queues work as CUDA orders it: work on the default stream waits for all blocking streams, and
  // work on a blocking stream for the default stream.
  Mark submit(Stream& stream, std::function<void()> work);
  // All that `stream` has to do up to now, with what it was told to wait for; and of all streams.
  std::vector<Mark> last(Stream& stream);
  std::vector<Mark> last_of_all();
  bool idle(Stream& stream);
  void synchronize();
};

// The calling thread's stack of contexts. Its depth is fixed, so that nothing is allocated.
class CurrentContext {
 public:
  static Context* get();
  static void set(Context* context);
  static bool push(Context* context);  // false: too deep
  static bool pop(Context*& context);  // false: empty
};

}  // namespace stasis::sim
