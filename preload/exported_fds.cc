#include "exported_fds.h"

#include <dirent.h>
#include <sys/resource.h>

namespace stasis::preload {
namespace {

// Descriptors below FD_SETSIZE that a program finds free while its memory is pinned.
constexpr std::uint64_t kSpareNumbers = 64;

}  // namespace

pthread_mutex_t g_exporting = PTHREAD_MUTEX_INITIALIZER;
Exported<direct::kExportBatch> g_exported;
Exported<kMostPinned> g_pinned;

bool may_have_descriptors(std::uint64_t more) {
  rlimit limit{};
  DIR* open = ::opendir("/proc/self/fd");
  if (!open) return false;
  std::uint64_t wanted = more;
  while (::readdir(open) != nullptr)
    ++wanted;
  ::closedir(open);
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && wanted <= limit.rlim_cur / 2 &&
         wanted < FD_SETSIZE - kSpareNumbers;
}

}  // namespace stasis::preload
