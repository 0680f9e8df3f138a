// The address space of a process that a test has made.
#pragma once

#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "base/ids.h"
#include "proc/address_space.h"

namespace stasis::fakes {

inline std::shared_ptr<const proc::AddressSpace> space_of(Pid pid) {
  auto space = proc::AddressSpace::open(pid);
  EXPECT_TRUE(space) << space.error().to_string();
  return space ? std::make_shared<const proc::AddressSpace>(std::move(*space)) : nullptr;
}

}  // namespace stasis::fakes
