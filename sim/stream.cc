#include "sim/stream.h"

#include <csignal>
#include <new>

namespace stasis::sim {

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
  lane->more_.notify_one();
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
  progress_.wait(lock, [&] { return completed_ >= sequence; });
}

void Lane::finish() {
  std::lock_guard lock(mutex_);
  finishing_ = true;
  // The thread's own end counts as work: it frees memory, which must not happen in a locked
  // process.
  if (started_) outstanding_.add();
  more_.notify_one();
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

void Lane::run_all() {
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [&] { return !queue_.empty() || finishing_; });
    if (queue_.empty()) return;
    {
      Work work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      for (const auto& mark : work.after)
        mark.wait();
      work.run();
    }
    lock.lock();
    ++completed_;
    progress_.notify_all();
    lock.unlock();
    // Last, and with nothing of ours held or still to be freed: as soon as the count is zero the
    // process may be locked, and this thread be stopped anywhere from here on.
    outstanding_.done();
    lock.lock();
  }
}

}  // namespace stasis::sim
