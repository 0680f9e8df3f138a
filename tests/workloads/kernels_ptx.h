// The PTX of the workloads' kernels; kernels.h says what each does. Private to kernels.cc.
#pragma once

namespace stasis::workloads::internal {

inline constexpr const char kKernelsPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64

// word(index, seed)
.func (.reg .b64 %out) word(.reg .b64 %index, .reg .b64 %seed)
{
  .reg .b64 %x, %y;
  mad.lo.u64 %x, %index, 0x9e3779b97f4a7c15, %seed;
  shr.u64 %y, %x, 30;
  xor.b64 %x, %x, %y;
  mul.lo.u64 %x, %x, 0xbf58476d1ce4e5b9;
  shr.u64 %y, %x, 27;
  xor.b64 %x, %x, %y;
  mul.lo.u64 %x, %x, 0x94d049bb133111eb;
  shr.u64 %y, %x, 31;
  xor.b64 %out, %x, %y;
  ret;
}

// The number of this thread in the whole grid.
.func (.reg .b64 %out) first_index()
{
  .reg .b32 %block, %size, %thread;
  .reg .b64 %wide;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %out, %block, %size;
  cvt.u64.u32 %wide, %thread;
  add.u64 %out, %out, %wide;
  ret;
}

// The number of threads in the whole grid.
.func (.reg .b64 %out) stride()
{
  .reg .b32 %blocks, %size;
  mov.u32 %blocks, %nctaid.x;
  mov.u32 %size, %ntid.x;
  mul.wide.u32 %out, %blocks, %size;
  ret;
}

.visible .entry fill(.param .u64 p_data, .param .u64 p_words, .param .u64 p_seed)
{
  .reg .pred %end;
  .reg .b64 %data, %words, %seed, %i, %step, %value, %at;
  ld.param.u64 %data, [p_data];
  ld.param.u64 %words, [p_words];
  ld.param.u64 %seed, [p_seed];
  cvta.to.global.u64 %data, %data;
  call (%i), first_index;
  call (%step), stride;
loop:
  setp.ge.u64 %end, %i, %words;
  @%end bra done;
  call (%value), word, (%i, %seed);
  shl.b64 %at, %i, 3;
  add.u64 %at, %data, %at;
  st.global.u64 [%at], %value;
  add.u64 %i, %i, %step;
  bra loop;
done:
  ret;
}

.visible .entry advance(.param .u64 p_data, .param .u64 p_words, .param .u64 p_from,
                        .param .u64 p_to, .param .u64 p_result)
{
  .reg .pred %end, %good, %later;
  .reg .b64 %data, %words, %from, %to, %result, %i, %step, %value, %wanted, %at;
  .reg .b64 %checked, %wrong, %rank, %none;
  ld.param.u64 %data, [p_data];
  ld.param.u64 %words, [p_words];
  ld.param.u64 %from, [p_from];
  ld.param.u64 %to, [p_to];
  ld.param.u64 %result, [p_result];
  cvta.to.global.u64 %data, %data;
  cvta.to.global.u64 %result, %result;
  mov.u64 %checked, 0;
  mov.u64 %wrong, 0;
  mov.u64 %rank, 0;
  call (%i), first_index;
  call (%step), stride;
loop:
  setp.ge.u64 %end, %i, %words;
  @%end bra sum;
  shl.b64 %at, %i, 3;
  add.u64 %at, %data, %at;
  ld.global.u64 %value, [%at];
  call (%wanted), word, (%i, %from);
  setp.eq.u64 %good, %value, %wanted;
  @%good bra next;
  setp.ne.u64 %later, %wrong, 0;
  add.u64 %wrong, %wrong, 1;
  @%later bra next;
  sub.u64 %rank, %words, %i;
next:
  call (%value), word, (%i, %to);
  st.global.u64 [%at], %value;
  add.u64 %checked, %checked, 1;
  add.u64 %i, %i, %step;
  bra loop;
sum:
  atom.global.add.u64 %none, [%result], %checked;
  setp.eq.u64 %good, %wrong, 0;
  @%good bra done;
  atom.global.add.u64 %none, [%result+8], %wrong;
  atom.global.max.u64 %none, [%result+16], %rank;
done:
  ret;
}

.visible .entry combine(.param .u64 p_target, .param .u64 p_source, .param .u64 p_words,
                        .param .u64 p_key)
{
  .reg .pred %end;
  .reg .b32 %zero;
  .reg .b64 %target, %source, %words, %key, %i, %step, %value, %sum, %at, %from, %slot, %slots;
  .local .align 8 .b8 scratch[2048];
  ld.param.u64 %target, [p_target];
  ld.param.u64 %source, [p_source];
  ld.param.u64 %words, [p_words];
  ld.param.u64 %key, [p_key];
  cvta.to.global.u64 %target, %target;
  cvta.to.global.u64 %source, %source;
  cvta.to.global.u64 %key, %key;
  ld.global.u64 %key, [%key];
  call (%i), first_index;
  call (%step), stride;
  mov.u64 %slots, scratch;
  mov.u32 %zero, %ctaid.y;
loop:
  setp.ge.u64 %end, %i, %words;
  @%end bra done;
  shl.b64 %at, %i, 3;
  add.u64 %from, %source, %at;
  // By way of local memory, so that there is some: the slot that is read is the one that was
  // written, which no compiler can know.
  and.b64 %slot, %at, 2040;
  add.u64 %slot, %slots, %slot;
  add.u64 %at, %target, %at;
  ld.global.u64 %value, [%from];
  call (%value), word, (%value, %key);
  st.local.u64 [%slot], %value;
  cvt.u64.u32 %value, %zero;
  shl.b64 %value, %value, 3;
  sub.u64 %slot, %slot, %slots;
  add.u64 %slot, %slot, %value;
  and.b64 %slot, %slot, 2040;
  add.u64 %slot, %slots, %slot;
  ld.local.u64 %value, [%slot];
  ld.global.u64 %sum, [%at];
  add.u64 %sum, %sum, %value;
  st.global.u64 [%at], %sum;
  add.u64 %i, %i, %step;
  bra loop;
done:
  ret;
}

.visible .entry spin(.param .u64 p_nanoseconds, .param .u64 p_done)
{
  .reg .pred %early;
  .reg .b64 %wait, %done, %start, %now, %none;
  ld.param.u64 %wait, [p_nanoseconds];
  ld.param.u64 %done, [p_done];
  cvta.to.global.u64 %done, %done;
  mov.u64 %start, %globaltimer;
loop:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %early, %now, %wait;
  @%early bra loop;
  atom.global.add.u64 %none, [%done], 1;
  ret;
}
)";

}  // namespace stasis::workloads::internal
