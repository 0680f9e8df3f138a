// The kernels of these tests: PTX for a real driver, functions of this program for the simulated
// one.
#pragma once

namespace stasis::conformance {

// increment(u64 data, u32 words)   data[i] += 1
// wait_flag(u64 flag)              until the word at `flag` (host memory) is not zero
inline constexpr char kPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry increment(.param .u64 data, .param .u32 words)
{
  .reg .pred %p;
  .reg .b32 %r<6>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [data];
  ld.param.u32 %r1, [words];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p, %r5, %r1;
  @%p bra DONE;
  mul.wide.u32 %rd2, %r5, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.u32 %r2, [%rd3];
  add.u32 %r2, %r2, 1;
  st.u32 [%rd3], %r2;
DONE:
  ret;
}

.visible .entry wait_flag(.param .u64 flag)
{
  .reg .pred %p;
  .reg .b32 %r<2>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [flag];
AGAIN:
  ld.volatile.u32 %r1, [%rd1];
  setp.eq.u32 %p, %r1, 0;
  @%p bra AGAIN;
  ret;
}
)";

}  // namespace stasis::conformance
