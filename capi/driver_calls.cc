// stasis-driver-calls LIBRARY [mover|swap-side|inside]: for a libstasis in another process, which
// starts this one and ends it, the driver's calls, the process that copies GPU memory, a side of a
// swap, or an operation in the namespaces of a job. Of no use by itself.
#include <cstdlib>
#include <exception>
#include <string_view>

#include "base/helper_process.h"
#include "direct/mover_server.h"
#include "driver/bounded_driver.h"
#include "driver/driver.h"
#include "job/inside.h"
#include "job/swap_side.h"

int main(int argc, char** argv) {
  try {
    const char* library = argc > 1 ? argv[1] : "";
    const std::string_view what = argc > 2 ? argv[2] : "";
    if (!what.empty() && *library != '\0') ::setenv("STASIS_LIBCUDA", library, 1);
    if (what == "swap-side") {
      stasis::end_with_starter();
      stasis::serve_as_helper(stasis::job::kSwapSideName, stasis::job::serve_swap_side);
    }
    if (what == "inside") {
      stasis::end_with_starter();
      stasis::serve_as_helper(stasis::job::kInsideName, stasis::job::serve_inside);
    }
    if (what == "mover") {
      stasis::serve_as_helper(stasis::direct::kMoverName, [](const stasis::Channel& owner) {
        stasis::direct::serve_mover(owner, {});
      });
    }
    auto driver = stasis::load_driver(library);
    if (!driver) return 1;
    stasis::serve_driver_calls(**driver);
  } catch (const std::exception&) {
    return 1;
  }
}
