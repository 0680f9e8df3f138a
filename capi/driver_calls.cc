// stasis-driver-calls LIBRARY [mover]: for a libstasis in another process, which starts this one
// and ends it, the driver's calls, or the process that copies GPU memory. Of no use by itself.
#include <cstdlib>
#include <exception>
#include <string_view>

#include "base/helper_process.h"
#include "direct/mover_server.h"
#include "driver/bounded_driver.h"
#include "driver/driver.h"

int main(int argc, char** argv) {
  try {
    const char* library = argc > 1 ? argv[1] : "";
    if (argc > 2 && std::string_view(argv[2]) == "mover") {
      if (*library != '\0') ::setenv("STASIS_LIBCUDA", library, 1);
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
