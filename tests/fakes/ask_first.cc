// Preloaded into criu: before it asks for the size of a pipe it makes the file $ASK_FIRST/asks, and
// waits until $ASK_FIRST/held is there. So another process has the lock of the pipe by then.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdlib>
#include <string>

namespace {

long call(int file, int command, long argument) {
  const char* folder = std::getenv("ASK_FIRST");
  if (command == F_GETPIPE_SZ && folder != nullptr) {
    ::close(::open((std::string(folder) + "/asks").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const std::string held = std::string(folder) + "/held";
    for (int i = 0; i < 1000 && ::access(held.c_str(), F_OK) != 0; ++i)
      ::usleep(10000);
    ::usleep(
        100000);  // the lock was taken before the page was asked for; that it waits is sure then
  }
  return ::syscall(SYS_fcntl, file, command, argument);
}

}  // namespace

// NOLINTBEGIN(cert-dcl50-cpp): as the C library has them
extern "C" int fcntl(int file, int command, ...) {
  va_list rest;
  va_start(rest, command);
  const long argument = va_arg(rest, long);
  va_end(rest);
  return static_cast<int>(call(file, command, argument));
}

extern "C" int fcntl64(int file, int command, ...) __attribute__((alias("fcntl")));
// NOLINTEND(cert-dcl50-cpp)
