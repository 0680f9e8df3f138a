// Preloaded into a program: writes into the file $SYNC_LOG, a line each and in order, which files
// it has brought to the disk ("fsync PATH") and what it gives a final name ("rename NAME").
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

void note(const char* what, const char* name) {
  const char* path = std::getenv("SYNC_LOG");
  const int log = path ? ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  if (log < 0) return;
  ::dprintf(log, "%s %s\n", what, name);
  ::close(log);
}

template <class Function>
Function* real(Function* /*own*/, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int fsync(int fd) {
  char link[64];
  char target[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = ::readlink(link, target, sizeof target - 1);
  target[length < 0 ? 0 : length] = '\0';
  static auto* const call = real(&fsync, "fsync");
  const int result = call(fd);
  if (result == 0) note("fsync", target);
  return result;
}

int renameat(int from_dir, const char* from, int to_dir, const char* to) {
  note("rename", to);
  static auto* const call = real(&renameat, "renameat");
  return call(from_dir, from, to_dir, to);
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  note("rename", to);
  static auto* const call = real(&renameat2, "renameat2");
  return call(from_dir, from, to_dir, to, flags);
}
}
