#include "job/stop_signal.h"

#include <atomic>
#include <csignal>

namespace stasis::job {
namespace {

std::atomic<Interrupt*> g_stopped{nullptr};

}  // namespace

void stop_by_sigterm(Interrupt& interrupt) {
  g_stopped = &interrupt;
  struct sigaction action {};
  action.sa_handler = [](int number) { g_stopped.load()->request(number); };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
}

}  // namespace stasis::job
