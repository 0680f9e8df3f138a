// A library whose name begins like the driver's, in whose functions a thread must not be parked,
// unless it sleeps there.
#include <sched.h>
#include <unistd.h>

#include <atomic>

static void busy(int steps) {
  for (int i = 0; i < steps; ++i)
    asm volatile("" ::"r"(i));
}

extern "C" {

// Holds `held` for a while: runs, and makes system calls too.
void fake_ask(std::atomic<int>* held) {
  held->store(1);
  busy(2000);
  sched_yield();
  busy(2000);
  held->store(0);
}

// Waits until there is something to read.
int fake_wait(int fd) {
  char byte = 0;
  return static_cast<int>(read(fd, &byte, 1));
}

}  // extern "C"
