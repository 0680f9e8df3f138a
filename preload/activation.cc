#include "activation.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

// For the tool, by its name.
extern "C" {
// NOLINTNEXTLINE(readability-identifier-naming): a C name
__attribute__((visibility("default"))) stasis::direct::Activation stasis_agent_activation{};
}

namespace stasis::preload {

using direct::Activation;

namespace {

std::atomic<bool> g_attached{false};
std::atomic<bool> g_waits{false};  // attached, and not to serve yet

void say(const char* text) { (void)!::write(STDERR_FILENO, text, std::strlen(text)); }

bool is_set(const char* variable) {
  const char* value = ::getenv(variable);
  return value && *value;
}

// The variable of that name, or, if the name ends with `_`, one that begins so; null if none is
// set.
const char* find_set(const char* name) {
  const auto length = std::strlen(name);
  if (name[length - 1] != '_') return is_set(name) ? name : nullptr;
  for (char** at = environ; at && *at; ++at)
    if (!std::strncmp(*at, name, length)) return name;
  return nullptr;
}

// The first bytes of a file, ended by a zero.
template <std::size_t size>
void read_file(const char* path, char (&text)[size]) {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  const auto got = fd < 0 ? 0 : ::read(fd, text, size - 1);
  text[got > 0 ? got : 0] = '\0';
  if (fd >= 0) ::close(fd);
}

// cuda-gdb marks its programs by variables inside the driver's library alone (cudadebugger.h). It
// is a script that starts a cuda-gdb-minimal or cuda-gdb-python3.*; remote, it is cuda-gdbserver.
bool traced_by_cuda_gdb() {
  constexpr char kTracer[] = "\nTracerPid:";
  char text[4096];
  read_file("/proc/self/status", text);
  const char* line = std::strstr(text, kTracer);
  const long tracer = line ? std::strtol(line + sizeof kTracer - 1, nullptr, 10) : 0;
  if (tracer <= 0) return false;
  char path[40];
  std::snprintf(path, sizeof path, "/proc/%ld/comm", tracer);
  read_file(path, text);
  return !std::strncmp(text, "cuda-gdb", 8);
}

void say_why(const char* why, const char* end) {
  if (is_attached()) return;
  say("stasis: a CUDA tool is at work here (");
  say(why);
  say(end);
  say("), so the direct path is left out, and the driver may refuse a checkpoint\n");
}

Activation decide() {
  const char* wish = ::getenv("STASIS_AGENT");
  if (wish && !std::strcmp(wish, "off")) return Activation::kOff;

  char path[4096];
  const auto length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (length > 0) {
    path[length] = '\0';
    const char* slash = std::strrchr(path, '/');
    const char* name = slash ? slash + 1 : path;
    for (const char* own : {"stasis", "cuda-checkpoint", "criu"})
      if (!std::strcmp(name, own)) return Activation::kOwnTool;
  }
  // The variables by which such tools have themselves loaded by the driver (CUPTI and Nsight:
  // CUDA_INJECTION64_PATH, of the CUPTI documentation), what compute-sanitizer and Nsight Compute
  // tell the programs that they start (..._PORT_BASE, ..._PERFWORKS_DIR; not documented), and what
  // users of cuda-gdb set beside TMPDIR.
  for (const char* tool :
       {"CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NV_SANITIZER_INJECTION_",
        "NV_COMPUTE_PROFILER_", "CUDBG_APICLIENT_PID"}) {
    const char* found = find_set(tool);
    if (!found) continue;
    say_why(found, found[std::strlen(found) - 1] == '_' ? "* is set" : " is set");
    return Activation::kCudaTool;
  }
  if (traced_by_cuda_gdb()) {
    say_why("cuda-gdb", "");
    return Activation::kCudaTool;
  }
  return Activation::kWorks;
}

}  // namespace

bool is_inactive() { return g_waits.load(std::memory_order_relaxed) || must_be_inactive(); }

Activation activation() {
  static const Activation decided = [] {
    const Activation made = decide();
    stasis_agent_activation = made;
    return made;
  }();
  return decided;
}

void set_attached() {
  g_attached.store(true);
  g_waits.store(true);
}

bool is_attached() { return g_attached.load(std::memory_order_relaxed); }

void begin_to_serve() { g_waits.store(false); }

}  // namespace stasis::preload
