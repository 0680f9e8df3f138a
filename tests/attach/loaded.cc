// A library that a program is made to load: tells by its answer that its constructors and its own
// thread-local storage are right there.
#include <cstdint>

namespace {

int g_constructed = 0;
__attribute__((constructor)) void construct() { g_constructed = 1000; }
thread_local int g_own = 5;

}  // namespace

extern "C" __attribute__((visibility("default"))) int stasis_loaded(std::uint64_t argument) {
  return g_constructed + g_own++ + static_cast<int>(argument);
}
