// stasis-driver-calls [LIBRARY]: the driver's calls for a libstasis in another process, which
// starts this one and ends it. Of no use by itself.
#include <exception>

#include "checkpoint/bounded_driver.h"
#include "driver/driver.h"

int main(int argc, char** argv) {
  try {
    auto driver = stasis::load_driver(argc > 1 ? argv[1] : "");
    if (!driver) return 1;
    stasis::serve_driver_calls(**driver);
  } catch (const std::exception&) {
    return 1;
  }
}
