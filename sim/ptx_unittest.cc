#include "sim/ptx.h"

#include <gtest/gtest.h>

namespace stasis::sim {
namespace {

TEST(Ptx, NamesKernelsAndLaysOutTheirParameters) {
  std::vector<PtxKernel> kernels;
  ASSERT_TRUE(parse_ptx(R"(
// .visible .entry not_this(.param .u32 x)
.version 8.0
.target sm_90
.address_size 64
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
                        kernels));
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
}

TEST(Ptx, RefusesWhatIsNone) {
  for (const char* text :
       {"", "hello", ".version 7.0 .entry", ".version 7.0 .entry f(.param .u32",
        ".version 7.0 .entry f(.param p)", ".version 7.0 .entry f(.param .b8 p[x])"}) {
    std::vector<PtxKernel> kernels;
    EXPECT_FALSE(parse_ptx(text, kernels)) << text;
  }
}

}  // namespace
}  // namespace stasis::sim
