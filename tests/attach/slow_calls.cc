// Calls that do not come back while a file is there, loaded by LD_PRELOAD: calloc(), for programs
// whose malloc() holds a thread of the tool up (STASIS_SLOW_MALLOC names the file), and readlink()
// of the user namespace, with which the agent's thread begins (STASIS_SLOW_AGENT).
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {

void wait_for(const char* variable) {
  const char* const flag = ::getenv(variable);
  while (flag != nullptr && ::access(flag, F_OK) == 0)
    ::usleep(1000);
}

}  // namespace

extern "C" {

void* __libc_calloc(std::size_t count, std::size_t size);  // NOLINT(bugprone-reserved-identifier)

__attribute__((visibility("default"))) void* calloc(std::size_t count, std::size_t size) {
  wait_for("STASIS_SLOW_MALLOC");
  return __libc_calloc(count, size);
}

__attribute__((visibility("default"))) ssize_t readlink(const char* path, char* out,
                                                        std::size_t size) {
  if (std::strcmp(path, "/proc/self/ns/user") == 0) wait_for("STASIS_SLOW_AGENT");
  return ::syscall(SYS_readlink, path, out, size);
}
}
