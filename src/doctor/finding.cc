#include "doctor/finding.h"

#include <algorithm>

namespace stasis {

std::string_view light_name(Light light) {
  switch (light) {
    case Light::kGreen:
      return "green";
    case Light::kYellow:
      return "yellow";
    case Light::kRed:
      return "red";
  }
  return "?";
}

Light worst(const std::vector<Finding>& findings) {
  Light out = Light::kGreen;
  for (const Finding& finding : findings)
    out = std::max(out, finding.light);
  return out;
}

}  // namespace stasis
