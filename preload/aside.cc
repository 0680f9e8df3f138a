#include "aside.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace stasis::preload {
namespace {

void say(const char* text) { (void)!::write(STDERR_FILENO, text, std::strlen(text)); }

bool is_set(const char* variable) {
  const char* value = ::getenv(variable);
  return value && *value;
}

bool decide() {
  const char* wish = ::getenv("STASIS_AGENT");
  if (wish && !std::strcmp(wish, "off")) return true;

  char path[4096];
  const auto length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (length > 0) {
    path[length] = '\0';
    const char* slash = std::strrchr(path, '/');
    const char* name = slash ? slash + 1 : path;
    for (const char* own : {"stasis", "cuda-checkpoint", "criu"})
      if (!std::strcmp(name, own)) return true;
  }
  // The variables by which such tools have themselves loaded by the driver (CUPTI,
  // compute-sanitizer, Nsight: CUDA_INJECTION64_PATH, of the CUPTI documentation) and by which
  // cuda-gdb marks its programs.
  for (const char* tool :
       {"CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDBG_APICLIENT_PID"}) {
    if (!is_set(tool)) continue;
    say("stasis: a CUDA tool is at work here (");
    say(tool);
    say(" is set), so the direct path is left out; checkpoints go through the driver\n");
    return true;
  }
  return false;
}

}  // namespace

bool steps_aside() {
  static const bool aside = decide();
  return aside;
}

}  // namespace stasis::preload
