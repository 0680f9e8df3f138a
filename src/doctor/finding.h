// What the doctor says about one thing: fine, worth knowing, or in the way.
//
// Plain values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"

namespace stasis {

enum class Light {
  kGreen,   // fine
  kYellow,  // works, with a limit that is worth knowing
  kRed,     // what the doctor was asked about will fail
};
std::string_view light_name(Light light);  // "green", "yellow", "red"

struct Finding {
  std::string id;  // what was looked at, for programs: "driver", "criu-check", "tcp-connection"
  Light light = Light::kGreen;
  std::string what;    // with the value seen: "driver 580.159.04", "4 GiB free in /images"
  std::string remedy;  // what to do; empty if green
  Pid pid = {};        // of what one process has; 0: of the machine, or of the whole tree
};

// The worst of them; green if there are none.
Light worst(const std::vector<Finding>& findings);

}  // namespace stasis
