// Threads of the agent's own.
#pragma once

#include <pthread.h>

#include <csignal>
#include <cstddef>

namespace stasis::preload {

// No handler of a signal runs in this thread meanwhile.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

// Detached. The program's signals are not for it, and its stack is not what `ulimit -s` says, which
// may be less than the driver needs.
inline bool start_thread(void* (*run)(void*), void* argument) {
  constexpr std::size_t kStack = std::size_t{2} << 20;
  const SignalsBlocked blocked;  // it inherits that
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  ::pthread_attr_setstacksize(&attributes, kStack);
  pthread_t thread{};
  const bool started = ::pthread_create(&thread, &attributes, run, argument) == 0;
  ::pthread_attr_destroy(&attributes);
  return started;
}

}  // namespace stasis::preload
