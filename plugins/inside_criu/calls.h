// System calls in which threads were stopped that criu is about to dump.
#pragma once

#include <sys/types.h>

namespace stasis::inside_criu {

// `answer`: an iovec, with the registers of a thread that criu has stopped and has asked for
// (PTRACE_GETREGSET, NT_PRSTATUS). Where the thread was in a call that would end with EINTR after
// the dump, they become those with which it is made again.
void make_call_again(pid_t thread, void* answer);

}  // namespace stasis::inside_criu
