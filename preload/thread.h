// Threads of the agent's own, and what may not happen to the program's in the agent's code.
#pragma once

#include <link.h>
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

// This thread is not cancelled meanwhile: what the C library takes for points of cancellation
// (close, open, recv, getrandom, ...) the driver's call has none of, and nothing of ours that the
// thread holds would be let go.
class Uncancelled {
 public:
  Uncancelled() { ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~Uncancelled() { ::pthread_setcancelstate(before_, nullptr); }
  Uncancelled(const Uncancelled&) = delete;
  Uncancelled& operator=(const Uncancelled&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// What the C library takes of each thread's stack for the program's thread-local variables, at
// most.
inline std::size_t thread_local_bytes() {
  std::size_t bytes = 0;
  ::dl_iterate_phdr(
      [](dl_phdr_info* library, std::size_t, void* sum) {
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const auto& part = library->dlpi_phdr[i];
          if (part.p_type == PT_TLS) *static_cast<std::size_t*>(sum) += part.p_memsz + part.p_align;
        }
        return 0;
      },
      &bytes);
  constexpr std::size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}
// Counted when the library is loaded: a library that comes later takes nothing of stacks, and a
// child that was forked while another thread threw an exception could wait for ever.
inline const std::size_t g_thread_local_bytes = thread_local_bytes();

// Detached. The program's signals are not for it, and its stack is not what `ulimit -s` says, which
// may be less than the driver needs.
inline bool start_thread(void* (*run)(void*), void* argument) {
  constexpr std::size_t kStack = std::size_t{2} << 20;
  const SignalsBlocked blocked;  // it inherits that
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  ::pthread_attr_setstacksize(&attributes, kStack + g_thread_local_bytes);
  pthread_t thread{};
  const bool started = ::pthread_create(&thread, &attributes, run, argument) == 0;
  ::pthread_attr_destroy(&attributes);
  return started;
}

}  // namespace stasis::preload
