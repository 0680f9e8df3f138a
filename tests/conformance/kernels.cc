#include "kernels.h"

#include <atomic>
#include <ctime>

#include "sim/stasis_sim_kernel.h"

extern "C" {
void stasis_sim_kernel_increment(const stasis::sim::Launch& launch, void** args);
void stasis_sim_kernel_wait_flag(const stasis::sim::Launch& launch, void** args);

void stasis_sim_kernel_increment(const stasis::sim::Launch& launch, void** args) {
  auto* data = *static_cast<unsigned**>(args[0]);
  const auto words = *static_cast<unsigned*>(args[1]);
  for (unsigned i = 0; i < words && i < launch.threads(); ++i)
    ++data[i];
}

void stasis_sim_kernel_wait_flag(const stasis::sim::Launch&, void** args) {
  auto* flag = *static_cast<std::atomic<unsigned>**>(args[0]);
  while (flag->load() == 0) {
    const timespec pause{0, 1'000'000};
    ::nanosleep(&pause, nullptr);
  }
}
}
