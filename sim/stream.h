// Streams and events: work that runs in order on a thread of its own, and marks in that order. A
// GPU works whatever becomes of the process's threads, so a thread that waits for work does it, if
// the stream's own has not begun with it: that one may be kept still.
//
// Ownership: a Stream's queue (Lane) is shared with the events recorded in it and with work that
// waits for it, so that destroying a stream leaves those valid. Its thread ends when the stream is
// destroyed and its queue is empty. Threads: everything may be called from any thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "sim/gate.h"

namespace stasis::sim {

struct Context;
struct Graph;
class Lane;

// A point in a lane: reached when that many of its pieces of work are done.
struct Mark {
  std::shared_ptr<Lane> lane;
  std::uint64_t sequence = 0;
  bool reached() const;
  void wait() const;
};

class Lane {
 public:
  explicit Lane(Outstanding& outstanding) : outstanding_(outstanding) {}
  // Queues work that starts when all marks of `after` are reached; starts the thread if need be.
  static Mark submit(const std::shared_ptr<Lane>& lane, std::function<void()> work,
                     std::vector<Mark> after);
  static Mark last(const std::shared_ptr<Lane>& lane);
  bool reached(std::uint64_t sequence);
  void wait(std::uint64_t sequence);
  void finish();  // the thread ends once the queue is empty

 private:
  struct Work {
    std::function<void()> run;
    std::vector<Mark> after;
  };
  static void* thread_main(void* self);
  void run_all();
  // The next piece, with the mutex held before and after, and not meanwhile.
  void run_one(std::unique_lock<std::mutex>& lock);
  // Until something has changed, or the time is over.
  void wait_for_change(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout);
  void tell_of_change();

  Outstanding& outstanding_;
  std::mutex mutex_;
  // No condition variable: that of the C library waits for those whom it has woken to be awake.
  std::atomic<std::uint32_t> changes_{0};
  bool at_work_ = false;
  std::deque<Work> queue_;
  std::uint64_t submitted_ = 0;
  std::uint64_t completed_ = 0;
  bool started_ = false;
  bool finishing_ = false;
};

struct Stream {
  std::uint64_t id = next_id();  // no other ever has it
  Context* context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  bool is_default = false;  // the context's legacy default stream
  std::shared_ptr<Lane> lane;
  static std::uint64_t next_id() {
    static std::atomic<std::uint64_t> last{6};
    return ++last;
  }
  std::vector<Mark> pending;  // cuStreamWaitEvent: what the next work has to wait for
  // While the stream is captured: where its work goes. Guarded by the context's mutex.
  std::shared_ptr<Graph> capture;
};

struct Event {
  struct Recording {
    Mark mark;
    std::atomic<std::int64_t> time_ns{0};
  };
  Context* context = nullptr;
  unsigned flags = 0;
  std::mutex mutex;
  std::shared_ptr<Recording> recording;  // the latest; none before the first
};

}  // namespace stasis::sim
