// What `stasis run --refresh-env` wants a program to see that a restored job starts: values of now,
// where the job has those of its first start.
//
// Done in the program that was started, before its main(): every way to start one comes by here,
// also system() and popen(), whose calls inside the C library no hook can stand in for. Only where
// STASIS_ENV_FILE is set, which `stasis run` does for jobs. Once, while the process has one thread.
#include "environment.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace stasis::preload {
namespace {

constexpr off_t kMostBytes = 1 << 20;

// What it says becomes the environment of this process, LD_PRELOAD included, so only root and the
// user of this process may have written it. A second name may be another user's link to a file that
// root has for something else.
bool may_be_believed(const struct stat& info) {
  return S_ISREG(info.st_mode) && (info.st_uid == 0 || info.st_uid == ::geteuid()) &&
         (info.st_mode & (S_IWGRP | S_IWOTH)) == 0 && info.st_nlink == 1;
}

// The whole file, ended by a zero, never given back; null if there is none.
char* read_changes(const char* path, std::size_t& size) {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return nullptr;
  struct stat info {};
  char* text = nullptr;
  if (::fstat(fd, &info) == 0 && may_be_believed(info) && info.st_size > 0 &&
      info.st_size <= kMostBytes) {
    size = static_cast<std::size_t>(info.st_size);
    text = static_cast<char*>(std::malloc(size + 1));
    if (text != nullptr && ::read(fd, text, size) != info.st_size) {
      std::free(text);
      text = nullptr;
    }
    if (text != nullptr) text[size] = '\0';
  }
  ::close(fd);
  return text;
}

// Does a change, "NAME=value", "NAME" or "NAME*", concern the variable?
bool concerns(const char* change, const char* variable) {
  const char* const equals = std::strchr(variable, '=');
  if (equals == nullptr) return false;
  const auto name = static_cast<std::size_t>(equals - variable);
  const std::size_t length = std::strcspn(change, "=");
  if (length > 0 && change[length] == '\0' && change[length - 1] == '*')
    return name >= length - 1 && std::strncmp(change, variable, length - 1) == 0;
  return name == length && std::strncmp(change, variable, length) == 0;
}

// Brought to a program that runs, the library is loaded by a descriptor (attach/inside_code.cc):
// that program has threads, and its environment is its own.
bool is_loaded_later() {
  constexpr const char* kByDescriptor[] = {"/proc/self/task/", "/proc/thread-self/fd/"};
  Dl_info own{};
  if (::dladdr(reinterpret_cast<const void*>(&refresh_environment), &own) == 0 ||
      own.dli_fname == nullptr)
    return false;
  for (const char* begin : kByDescriptor)
    if (std::strncmp(own.dli_fname, begin, std::strlen(begin)) == 0) return true;
  return false;
}

__attribute__((constructor)) void at_start() {
  if (is_loaded_later()) return;
  const char* const path = std::getenv("STASIS_ENV_FILE");
  if (path != nullptr && *path != '\0') refresh_environment(path);
}

}  // namespace

void refresh_environment(const char* path) {
  std::size_t size = 0;
  char* const text = read_changes(path, size);
  if (text == nullptr || environ == nullptr) return;
  std::size_t most = 1;
  for (char** at = environ; *at != nullptr; ++at)
    ++most;
  for (std::size_t i = 0; i < size; ++i)
    most += text[i] == '\0' ? 1 : 0;
  // Not setenv(): a program may have one of its own, as bash does, which is not ready yet.
  auto** const changed = static_cast<char**>(std::malloc((most + 1) * sizeof(char*)));
  if (changed == nullptr) return;
  std::size_t count = 0;
  for (char** at = environ; *at != nullptr; ++at) {
    bool stays = true;
    for (const char* change = text; change < text + size; change += std::strlen(change) + 1)
      stays = stays && !concerns(change, *at);
    if (stays) changed[count++] = *at;
  }
  for (char* change = text; change < text + size; change += std::strlen(change) + 1)
    if (std::strchr(change, '=') != nullptr) changed[count++] = change;
  changed[count] = nullptr;
  environ = changed;
}

}  // namespace stasis::preload
