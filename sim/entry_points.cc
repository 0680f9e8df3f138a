// What the simulated driver exports: entry points that all begin with the same ten bytes, none of
// which depends on where they lie, as those of driver 580.159.04 do. `stasis attach` puts hooks
// there, and goes by these bytes. Each undoes what it has begun with and goes on to the function.
#include "sim/api.h"

// clang-format off
#define STASIS_SIM_ENTRY_POINT(symbol, ...) "sim_entry_point " #symbol "\n"
asm(".text\n"
    ".macro sim_entry_point name\n"
    ".balign 16\n.globl \\name\n.type \\name, @function\n\\name:\n.cfi_startproc\n"
    "push %rbp\n.cfi_adjust_cfa_offset 8\n"
    "mov %rsp, %rbp\n"
    "push %r12\n.cfi_adjust_cfa_offset 8\n"
    "sub $8, %rsp\n.cfi_adjust_cfa_offset 8\n"
    "add $8, %rsp\n.cfi_adjust_cfa_offset -8\n"
    "pop %r12\n.cfi_adjust_cfa_offset -8\n"
    "pop %rbp\n.cfi_adjust_cfa_offset -8\n"
    "jmp sim_\\name\n.cfi_endproc\n.size \\name, . - \\name\n"
    ".endm\n"
    STASIS_SIM_API(STASIS_SIM_ENTRY_POINT)
    "sim_entry_point cuGetProcAddress\n"
    "sim_entry_point cuMemGetHandleForAddressRange\n"
    ".purgem sim_entry_point\n");
// clang-format on
