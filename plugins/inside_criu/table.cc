#include "inside_criu/table.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

namespace stasis::inside_criu {

Table* table = nullptr;
dev_t memory_device = 0;
pid_t tool = 0;
bool binds_anywhere = false;

namespace {

// Before criu's main().
__attribute__((constructor)) void hear() {
  binds_anywhere = std::getenv(kBindVariable) != nullptr;
  // For criu alone, and not for what it starts.
  if (binds_anywhere) {
    (void)::unsetenv(kBindVariable);
    (void)::unsetenv("LD_PRELOAD");
  }
  const char* const number = std::getenv(kDescriptorVariable);
  if (number == nullptr) return;
  int fd = 0;
  for (const char* digit = number; *digit >= '0' && *digit <= '9' && fd < 100000; ++digit)
    fd = fd * 10 + (*digit - '0');
  struct stat info {};
  if (::fstat(fd, &info) == 0) memory_device = info.st_dev;
  void* const mapped = ::mmap(nullptr, kTableBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  (void)::close(fd);
  (void)::unsetenv(kDescriptorVariable);
  (void)::unsetenv("LD_PRELOAD");
  if (mapped == MAP_FAILED) return;
  tool = ::getppid();
  table = static_cast<Table*>(mapped);
  table->is_heard.store(1, std::memory_order_release);
}

}  // namespace
}  // namespace stasis::inside_criu
