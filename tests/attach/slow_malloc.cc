// A calloc() that does not come back while the file is there that STASIS_SLOW_MALLOC names: for
// programs whose malloc() holds a thread of the tool up. Loaded by LD_PRELOAD.
#include <unistd.h>

#include <cstddef>
#include <cstdlib>

extern "C" {

void* __libc_calloc(std::size_t count, std::size_t size);  // NOLINT(bugprone-reserved-identifier)

__attribute__((visibility("default"))) void* calloc(std::size_t count, std::size_t size) {
  const char* const flag = ::getenv("STASIS_SLOW_MALLOC");
  while (flag != nullptr && ::access(flag, F_OK) == 0)
    ::usleep(1000);
  return __libc_calloc(count, size);
}
}
