// Threads of the agent's own.
#pragma once

#include <pthread.h>

#include <csignal>
#include <cstddef>

namespace stasis::preload {

// Detached. The program's signals are not for it, and its stack is not what `ulimit -s` says, which
// may be less than the driver needs.
inline bool start_thread(void* (*run)(void*), void* argument) {
  constexpr std::size_t kStack = std::size_t{2} << 20;
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  ::pthread_attr_setstacksize(&attributes, kStack);
  pthread_t thread{};
  const bool started = ::pthread_create(&thread, &attributes, run, argument) == 0;
  ::pthread_attr_destroy(&attributes);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace stasis::preload
