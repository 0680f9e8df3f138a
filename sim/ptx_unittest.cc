#include "sim/ptx.h"

#include <gtest/gtest.h>

namespace stasis::sim {
namespace {

TEST(Ptx, NamesKernelsAndManagedVariablesAndLaysOutParameters) {
  PtxModule module;
  ASSERT_TRUE(parse_ptx(R"(
// .visible .entry not_this(.param .u32 x)
.version 8.0
.target sm_90
.address_size 64
.visible .global .attribute(.managed) .align 8 .b8 pairs[2][40];
.global .align 4 .u32 plain;
.global .attribute(.managed) .u64 counted = 1;
.func helper(.param .u32 a) { ret; }
.visible .entry add(
    .param .u64 .ptr .global .align 4 add_param_0, /* , ) */
    .param .u32 add_param_1,
    .param .align 16 .b8 add_param_2[24],
    .param .f64 add_param_3
)
.maxntid 256, 1, 1
{ ret; }
.entry nothing() { ret; }
.entry bare { ret; }
)",
                        module));
  const auto& kernels = module.kernels;
  ASSERT_EQ(kernels.size(), 3u);
  EXPECT_EQ(kernels[0].name, "add");
  ASSERT_EQ(kernels[0].parameters.size(), 4u);
  EXPECT_EQ(kernels[0].parameters[0].size, 8u);
  EXPECT_EQ(kernels[0].parameters[1].offset, 8u);
  EXPECT_EQ(kernels[0].parameters[2].offset, 16u);
  EXPECT_EQ(kernels[0].parameters[2].size, 24u);
  EXPECT_EQ(kernels[0].parameters[3].offset, 40u);
  EXPECT_EQ(kernels[0].argument_bytes, 48u);
  EXPECT_EQ(kernels[1].name, "nothing");
  EXPECT_TRUE(kernels[1].parameters.empty());
  EXPECT_EQ(kernels[2].name, "bare");
  ASSERT_EQ(module.managed.size(), 2u);
  EXPECT_EQ(module.managed[0].name, "pairs");
  EXPECT_EQ(module.managed[0].size, 80u);
  EXPECT_EQ(module.managed[1].name, "counted");
  EXPECT_EQ(module.managed[1].size, 8u);
}

TEST(Ptx, RefusesWhatIsNone) {
  for (const char* text :
       {"", "hello", ".version 7.0 .entry", ".version 7.0 .entry f(.param .u32",
        ".version 7.0 .global .attribute(.managed) .b8 x",
        ".version 7.0 .global .attribute(.managed) ;", ".version 7.0 .entry f(.param p)",
        ".version 7.0 .entry f(.param .b8 p[x])"}) {
    PtxModule module;
    EXPECT_FALSE(parse_ptx(text, module)) << text;
  }
}

}  // namespace
}  // namespace stasis::sim
