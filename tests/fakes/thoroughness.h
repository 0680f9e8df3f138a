// How often a test does what shows a rare fault only now and then.
#pragma once

#include <cstdlib>

namespace stasis::fakes {

// `many` where all tests are asked for (tools/test --all).
inline int times(int few, int many) {
  return std::getenv("STASIS_ALL_TESTS") == nullptr ? few : many;
}

}  // namespace stasis::fakes
