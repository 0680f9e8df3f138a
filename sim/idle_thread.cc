#include "sim/idle_thread.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

namespace stasis::sim {
namespace {

std::atomic<pid_t> process_with_thread{0};

void* idle(void*) {
  for (;;)
    (void)::poll(nullptr, 0, -1);
}

}  // namespace

void start_idle_thread() {
  constexpr std::size_t kStack = 256 << 10;
  const pid_t self = ::getpid();
  if (process_with_thread.exchange(self) == self) return;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_t thread;
  const int rc = pthread_create(&thread, &attributes, idle, nullptr);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_attr_destroy(&attributes);
  if (rc != 0) return process_with_thread.store(0);
  pthread_setname_np(thread, "sim-idle");
}

}  // namespace stasis::sim
