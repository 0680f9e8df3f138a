// What nvcc 13.0 makes of gpu_digest.cu, for every GPU from compute capability 7.5 on (the driver
// compiles it for the one that is there):
//   nvcc -O3 -arch=compute_75 -ptx gpu_digest.cu
// without comments, and with the version of PTX set to 7.0, which drivers of CUDA 11 know.
#pragma once

namespace stasis::direct {

inline constexpr const char* kDigestPtx = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry stasis_xxh3_lanes(
	.param .u64 stasis_xxh3_lanes_param_0,
	.param .u64 stasis_xxh3_lanes_param_1,
	.param .u64 stasis_xxh3_lanes_param_2,
	.param .u64 stasis_xxh3_lanes_param_3,
	.param .u64 stasis_xxh3_lanes_param_4
)
{
	.reg .pred 	%p<5>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<202>;
	ld.param.u64 	%rd35, [stasis_xxh3_lanes_param_0];
	ld.param.u64 	%rd36, [stasis_xxh3_lanes_param_1];
	ld.param.u64 	%rd39, [stasis_xxh3_lanes_param_2];
	ld.param.u64 	%rd37, [stasis_xxh3_lanes_param_3];
	ld.param.u64 	%rd38, [stasis_xxh3_lanes_param_4];
	mov.u32 	%r2, %ctaid.x;
	mov.u32 	%r3, %ntid.x;
	mul.wide.u32 	%rd40, %r2, %r3;
	mov.u32 	%r4, %tid.x;
	cvt.u64.u32 	%rd41, %r4;
	add.s64 	%rd1, %rd40, %rd41;
	shr.u64 	%rd2, %rd1, 3;
	cvt.u32.u64 	%r5, %rd1;
	and.b32  	%r1, %r5, 7;
	setp.ge.u64 	%p1, %rd2, %rd39;
	@%p1 bra 	$L__BB0_5;
	mul.lo.s32 	%r6, %r1, 19;
	cvta.to.global.u64 	%rd42, %rd36;
	mul.wide.u32 	%rd43, %r6, 8;
	add.s64 	%rd3, %rd42, %rd43;
	ld.global.nc.u64 	%rd201, [%rd3+144];
	setp.eq.s64 	%p2, %rd37, 0;
	@%p2 bra 	$L__BB0_4;
	cvta.to.global.u64 	%rd45, %rd35;
	ld.global.nc.u64 	%rd5, [%rd3];
	ld.global.nc.u64 	%rd6, [%rd3+8];
	ld.global.nc.u64 	%rd7, [%rd3+16];
	ld.global.nc.u64 	%rd8, [%rd3+24];
	ld.global.nc.u64 	%rd9, [%rd3+32];
	ld.global.nc.u64 	%rd10, [%rd3+40];
	ld.global.nc.u64 	%rd11, [%rd3+48];
	ld.global.nc.u64 	%rd12, [%rd3+56];
	ld.global.nc.u64 	%rd13, [%rd3+64];
	ld.global.nc.u64 	%rd14, [%rd3+72];
	ld.global.nc.u64 	%rd15, [%rd3+80];
	ld.global.nc.u64 	%rd16, [%rd3+88];
	ld.global.nc.u64 	%rd17, [%rd3+96];
	ld.global.nc.u64 	%rd18, [%rd3+104];
	ld.global.nc.u64 	%rd19, [%rd3+112];
	ld.global.nc.u64 	%rd20, [%rd3+120];
	ld.global.nc.u64 	%rd21, [%rd3+128];
	ld.global.nc.u64 	%rd22, [%rd3+136];
	mul.lo.s64 	%rd46, %rd2, %rd37;
	shl.b64 	%rd47, %rd46, 7;
	xor.b32  	%r7, %r1, 1;
	cvt.u64.u32 	%rd48, %r7;
	mov.u64 	%rd49, 1;
	sub.s64 	%rd23, %rd49, %rd37;
	or.b64  	%rd50, %rd48, %rd47;
	shl.b64 	%rd51, %rd50, 3;
	add.s64 	%rd52, %rd45, %rd51;
	add.s64 	%rd198, %rd52, 512;
	cvt.u64.u32 	%rd53, %r1;
	or.b64  	%rd54, %rd53, %rd47;
	shl.b64 	%rd55, %rd54, 3;
	add.s64 	%rd56, %rd45, %rd55;
	add.s64 	%rd197, %rd56, 512;
	mov.u64 	%rd199, 0;
$L__BB0_3:
	add.s64 	%rd57, %rd23, %rd199;
	setp.eq.s64 	%p3, %rd57, 0;
	ld.global.nc.u64 	%rd58, [%rd197+-512];
	xor.b64  	%rd59, %rd5, %rd58;
	and.b64  	%rd60, %rd59, 4294967295;
	shr.u64 	%rd61, %rd59, 32;
	mul.lo.s64 	%rd62, %rd60, %rd61;
	ld.global.nc.u64 	%rd63, [%rd198+-512];
	add.s64 	%rd64, %rd63, %rd201;
	add.s64 	%rd65, %rd64, %rd62;
	ld.global.nc.u64 	%rd66, [%rd197+-448];
	xor.b64  	%rd67, %rd6, %rd66;
	and.b64  	%rd68, %rd67, 4294967295;
	shr.u64 	%rd69, %rd67, 32;
	mul.lo.s64 	%rd70, %rd68, %rd69;
	ld.global.nc.u64 	%rd71, [%rd198+-448];
	add.s64 	%rd72, %rd71, %rd65;
	add.s64 	%rd73, %rd72, %rd70;
	ld.global.nc.u64 	%rd74, [%rd197+-384];
	xor.b64  	%rd75, %rd7, %rd74;
	and.b64  	%rd76, %rd75, 4294967295;
	shr.u64 	%rd77, %rd75, 32;
	mul.lo.s64 	%rd78, %rd76, %rd77;
	ld.global.nc.u64 	%rd79, [%rd198+-384];
	add.s64 	%rd80, %rd79, %rd73;
	add.s64 	%rd81, %rd80, %rd78;
	ld.global.nc.u64 	%rd82, [%rd197+-320];
	xor.b64  	%rd83, %rd8, %rd82;
	and.b64  	%rd84, %rd83, 4294967295;
	shr.u64 	%rd85, %rd83, 32;
	mul.lo.s64 	%rd86, %rd84, %rd85;
	ld.global.nc.u64 	%rd87, [%rd198+-320];
	add.s64 	%rd88, %rd87, %rd81;
	add.s64 	%rd89, %rd88, %rd86;
	ld.global.nc.u64 	%rd90, [%rd197+-256];
	xor.b64  	%rd91, %rd9, %rd90;
	and.b64  	%rd92, %rd91, 4294967295;
	shr.u64 	%rd93, %rd91, 32;
	mul.lo.s64 	%rd94, %rd92, %rd93;
	ld.global.nc.u64 	%rd95, [%rd198+-256];
	add.s64 	%rd96, %rd95, %rd89;
	add.s64 	%rd97, %rd96, %rd94;
	ld.global.nc.u64 	%rd98, [%rd197+-192];
	xor.b64  	%rd99, %rd10, %rd98;
	and.b64  	%rd100, %rd99, 4294967295;
	shr.u64 	%rd101, %rd99, 32;
	mul.lo.s64 	%rd102, %rd100, %rd101;
	ld.global.nc.u64 	%rd103, [%rd198+-192];
	add.s64 	%rd104, %rd103, %rd97;
	add.s64 	%rd105, %rd104, %rd102;
	ld.global.nc.u64 	%rd106, [%rd197+-128];
	xor.b64  	%rd107, %rd11, %rd106;
	and.b64  	%rd108, %rd107, 4294967295;
	shr.u64 	%rd109, %rd107, 32;
	mul.lo.s64 	%rd110, %rd108, %rd109;
	ld.global.nc.u64 	%rd111, [%rd198+-128];
	add.s64 	%rd112, %rd111, %rd105;
	add.s64 	%rd113, %rd112, %rd110;
	ld.global.nc.u64 	%rd114, [%rd197+-64];
	xor.b64  	%rd115, %rd12, %rd114;
	and.b64  	%rd116, %rd115, 4294967295;
	shr.u64 	%rd117, %rd115, 32;
	mul.lo.s64 	%rd118, %rd116, %rd117;
	ld.global.nc.u64 	%rd119, [%rd198+-64];
	add.s64 	%rd120, %rd119, %rd113;
	add.s64 	%rd121, %rd120, %rd118;
	ld.global.nc.u64 	%rd122, [%rd197];
	xor.b64  	%rd123, %rd13, %rd122;
	and.b64  	%rd124, %rd123, 4294967295;
	shr.u64 	%rd125, %rd123, 32;
	mul.lo.s64 	%rd126, %rd124, %rd125;
	ld.global.nc.u64 	%rd127, [%rd198];
	add.s64 	%rd128, %rd127, %rd121;
	add.s64 	%rd129, %rd128, %rd126;
	ld.global.nc.u64 	%rd130, [%rd197+64];
	xor.b64  	%rd131, %rd14, %rd130;
	and.b64  	%rd132, %rd131, 4294967295;
	shr.u64 	%rd133, %rd131, 32;
	mul.lo.s64 	%rd134, %rd132, %rd133;
	ld.global.nc.u64 	%rd135, [%rd198+64];
	add.s64 	%rd136, %rd135, %rd129;
	add.s64 	%rd137, %rd136, %rd134;
	ld.global.nc.u64 	%rd138, [%rd197+128];
	xor.b64  	%rd139, %rd15, %rd138;
	and.b64  	%rd140, %rd139, 4294967295;
	shr.u64 	%rd141, %rd139, 32;
	mul.lo.s64 	%rd142, %rd140, %rd141;
	ld.global.nc.u64 	%rd143, [%rd198+128];
	add.s64 	%rd144, %rd143, %rd137;
	add.s64 	%rd145, %rd144, %rd142;
	ld.global.nc.u64 	%rd146, [%rd197+192];
	xor.b64  	%rd147, %rd16, %rd146;
	and.b64  	%rd148, %rd147, 4294967295;
	shr.u64 	%rd149, %rd147, 32;
	mul.lo.s64 	%rd150, %rd148, %rd149;
	ld.global.nc.u64 	%rd151, [%rd198+192];
	add.s64 	%rd152, %rd151, %rd145;
	add.s64 	%rd153, %rd152, %rd150;
	ld.global.nc.u64 	%rd154, [%rd197+256];
	xor.b64  	%rd155, %rd17, %rd154;
	and.b64  	%rd156, %rd155, 4294967295;
	shr.u64 	%rd157, %rd155, 32;
	mul.lo.s64 	%rd158, %rd156, %rd157;
	ld.global.nc.u64 	%rd159, [%rd198+256];
	add.s64 	%rd160, %rd159, %rd153;
	add.s64 	%rd161, %rd160, %rd158;
	ld.global.nc.u64 	%rd162, [%rd197+320];
	xor.b64  	%rd163, %rd18, %rd162;
	and.b64  	%rd164, %rd163, 4294967295;
	shr.u64 	%rd165, %rd163, 32;
	mul.lo.s64 	%rd166, %rd164, %rd165;
	ld.global.nc.u64 	%rd167, [%rd198+320];
	add.s64 	%rd168, %rd167, %rd161;
	add.s64 	%rd169, %rd168, %rd166;
	ld.global.nc.u64 	%rd170, [%rd197+384];
	xor.b64  	%rd171, %rd19, %rd170;
	and.b64  	%rd172, %rd171, 4294967295;
	shr.u64 	%rd173, %rd171, 32;
	mul.lo.s64 	%rd174, %rd172, %rd173;
	ld.global.nc.u64 	%rd175, [%rd198+384];
	add.s64 	%rd176, %rd175, %rd169;
	add.s64 	%rd177, %rd176, %rd174;
	selp.b64 	%rd178, %rd22, %rd20, %p3;
	ld.global.nc.u64 	%rd179, [%rd197+448];
	xor.b64  	%rd180, %rd178, %rd179;
	and.b64  	%rd181, %rd180, 4294967295;
	shr.u64 	%rd182, %rd180, 32;
	mul.lo.s64 	%rd183, %rd181, %rd182;
	ld.global.nc.u64 	%rd184, [%rd198+448];
	add.s64 	%rd185, %rd184, %rd177;
	add.s64 	%rd186, %rd185, %rd183;
	shr.u64 	%rd187, %rd186, 47;
	xor.b64  	%rd188, %rd186, %rd21;
	xor.b64  	%rd189, %rd188, %rd187;
	mul.lo.s64 	%rd190, %rd189, 2654435761;
	selp.b64 	%rd201, %rd186, %rd190, %p3;
	add.s64 	%rd198, %rd198, 1024;
	add.s64 	%rd197, %rd197, 1024;
	add.s64 	%rd199, %rd199, 1;
	setp.lt.u64 	%p4, %rd199, %rd37;
	@%p4 bra 	$L__BB0_3;
$L__BB0_4:
	and.b64  	%rd191, %rd1, 2305843009213693944;
	cvt.u64.u32 	%rd192, %r1;
	or.b64  	%rd193, %rd191, %rd192;
	cvta.to.global.u64 	%rd194, %rd38;
	shl.b64 	%rd195, %rd193, 3;
	add.s64 	%rd196, %rd194, %rd195;
	st.global.u64 	[%rd196], %rd201;
$L__BB0_5:
	ret;
}
)";

}  // namespace stasis::direct
