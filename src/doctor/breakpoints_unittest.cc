#include "doctor/breakpoints.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "abi/attach_state.h"

namespace stasis::doctor {
namespace {

constexpr std::size_t kAt = 64;

std::vector<unsigned char> page() {
  std::vector<unsigned char> bytes(4096, 0x90);
  std::copy(std::begin(attach::kEntryBegin), std::end(attach::kEntryBegin), bytes.begin() + kAt);
  return bytes;
}

TEST(Breakpoints, AnInt3ThatTheFileDoesNotHaveIsOne) {
  auto memory = page();
  EXPECT_FALSE(find_breakpoint(memory, page()));
  memory[kAt] = 0xcc;
  EXPECT_EQ(find_breakpoint(memory, page()), kAt);
}

TEST(Breakpoints, AHookOfAnAgentIsNoneWhateverItsDistance) {
  auto memory = page();
  memory[kAt] = 0xe9;
  std::fill_n(memory.begin() + kAt + 1, 4, static_cast<unsigned char>(0xcc));
  EXPECT_FALSE(find_breakpoint(memory, page()));
  // One beside it is.
  memory[kAt + 20] = 0xcc;
  EXPECT_EQ(find_breakpoint(memory, page()), kAt + 20);
}

TEST(Breakpoints, AJumpElsewhereIsNoHook) {
  auto memory = page();
  memory[kAt + 1] = 0xe9;
  memory[kAt + 2] = 0xcc;
  EXPECT_EQ(find_breakpoint(memory, page()), kAt + 2);
}

}  // namespace
}  // namespace stasis::doctor
