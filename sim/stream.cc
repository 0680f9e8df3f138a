#include "sim/stream.h"

#include <csignal>
#include <new>

#include "abi/futex.h"

namespace stasis::sim {
namespace {

// A thread that is not kept still has begun with its work by then.
constexpr std::chrono::milliseconds kOwnThreadBegins{2};
constexpr std::chrono::nanoseconds kForEver{-1};

}  // namespace

bool Mark::reached() const { return !lane || lane->reached(sequence); }
void Mark::wait() const {
  if (lane) lane->wait(sequence);
}

Mark Lane::submit(const std::shared_ptr<Lane>& lane, std::function<void()> work,
                  std::vector<Mark> after) {
  std::lock_guard lock(lane->mutex_);
  if (!lane->started_) {
    // No signal of the program is handled on our threads.
    sigset_t all;
    sigset_t old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    auto* self = new std::shared_ptr<Lane>(lane);
    pthread_t thread;
    const int rc = pthread_create(&thread, nullptr, thread_main, self);
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    if (rc != 0) {
      delete self;
      throw std::bad_alloc();
    }
    pthread_setname_np(thread, "sim-stream");
    pthread_detach(thread);
    lane->started_ = true;
  }
  lane->queue_.push_back({std::move(work), std::move(after)});
  lane->outstanding_.add();
  lane->tell_of_change();
  return {lane, ++lane->submitted_};
}

Mark Lane::last(const std::shared_ptr<Lane>& lane) {
  std::lock_guard lock(lane->mutex_);
  return {lane, lane->submitted_};
}

bool Lane::reached(std::uint64_t sequence) {
  std::lock_guard lock(mutex_);
  return completed_ >= sequence;
}

void Lane::wait(std::uint64_t sequence) {
  std::unique_lock lock(mutex_);
  while (completed_ < sequence) {
    const auto before = completed_;
    wait_for_change(lock, kOwnThreadBegins);
    if (completed_ == before && !at_work_ && !queue_.empty()) run_one(lock);
  }
}

void Lane::finish() {
  std::lock_guard lock(mutex_);
  finishing_ = true;
  // The thread's own end counts as work: it frees memory, which must not happen in a locked
  // process.
  if (started_) outstanding_.add();
  tell_of_change();
}

void* Lane::thread_main(void* self) {
  std::shared_ptr<Lane> lane = *static_cast<std::shared_ptr<Lane>*>(self);
  delete static_cast<std::shared_ptr<Lane>*>(self);
  auto& outstanding = lane->outstanding_;
  lane->run_all();
  lane.reset();
  outstanding.done();
  return nullptr;
}

void Lane::wait_for_change(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout) {
  const std::uint32_t seen = changes_.load();
  lock.unlock();
  futex::wait(changes_, seen, false, timeout);
  lock.lock();
}

void Lane::tell_of_change() {
  ++changes_;
  futex::wake_all(changes_, false);
}

void Lane::run_one(std::unique_lock<std::mutex>& lock) {
  at_work_ = true;
  {
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    for (const auto& mark : work.after)
      mark.wait();
    work.run();
  }
  lock.lock();
  at_work_ = false;
  ++completed_;
  tell_of_change();
  lock.unlock();
  // Last, and with nothing of ours held or still to be freed: as soon as the count is zero the
  // process may be locked, and this thread be stopped anywhere from here on.
  outstanding_.done();
  lock.lock();
}

void Lane::run_all() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!at_work_ && !queue_.empty())
      run_one(lock);
    else if (queue_.empty() && !at_work_ && finishing_)
      return;
    else
      wait_for_change(lock, kForEver);
  }
}

}  // namespace stasis::sim
