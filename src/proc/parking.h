// Keeps the threads of a program still while its GPU is away.
//
// Driver 580 lets some calls pass its lock (cuStreamQuery, cuEventQuery, cuStreamSynchronize,
// cuMemGetInfo, ...), and a thread that makes one while the process is checkpointed ends the whole
// process (580.159.04 on H100 and H200; docs/adr/0007). So none of its threads may run then but the
// one by which the driver acts, and the agent's while the tool asks it for what takes no driver.
// Stopping the process (SIGSTOP) would stop that one as well, and a tracer would have to live as
// long as the suspension, and keep CRIU out. A parked thread waits in a futex call instead, in a
// small mapping of ours in the target, which also holds the registers and the signal mask to go on
// with. It needs no other process: not the tool, which may be killed at any instant, and no record.
// CRIU dumps and restores it like any other waiting thread. Signals wait until it goes on, as they
// do for a stopped process; SIGKILL works.
//
// The mapping stays for the next time. What is read in the process, and the threads that are
// changed by it, are of one address space: a process that becomes another program in the middle is
// left alone (kProcessGone). Thread-safe, as long as one at a time acts on a process.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "proc/remote_syscall.h"
#include "proc/zero_pages.h"

namespace stasis {

// Parks all threads of `pid` but those `spared`. Those that are parked already stay so. kBusy
// (another tracer, a thread in a call that nothing interrupts), kNotPermitted, kNotSupported: no
// thread is parked that was not before.
Result<void> park_threads(Pid pid, const std::vector<Tid>& spared);

// The same, but after an error those that were parked stay so.
Result<void> park_more_threads(Pid pid, const std::vector<Tid>& spared);

// Sends all parked threads on. No error if there is none. On an error some may still be parked.
Result<void> unpark_threads(Pid pid);

// Whether all threads of the process but those `spared` are parked. One that runs is waited for up
// to a second, for it may be on its way.
bool all_are_parked(const proc::AddressSpace& space, const std::vector<Tid>& spared);

// Says in the place of the parked threads that what CRIU makes of this process lacks memory that is
// in the image (host_memory.h). The range that it returns is to be kept from CRIU together with
// that memory: it is what tells the process, which has it, from its restored image, which has not.
// kBusy if no thread has been parked; kNotSupported if a stasis that knew no such range has.
Result<AddressRange> mark_host_memory_saved(const proc::AddressSpace& space);
// The memory of a restored process is there.
Result<void> mark_host_memory_there(const proc::AddressSpace& space);
// kWrongState if the process lacks its memory, or mark_memory_in_work() was said: it must neither
// run nor be restored by the driver. unpark_threads() refuses it, too.
Result<void> check_host_memory_is_there(Pid pid);

// The same of memory that an agent is replacing under the parked threads (direct/stillness.h):
// until it has answered, none of them may run, whatever becomes of the tool that has asked.
Result<void> mark_memory_in_work(const proc::AddressSpace& space, bool in_work);
Result<bool> is_memory_in_work(const proc::AddressSpace& space);

// Sends on a thread that a killed tool has left in the middle of a remote system call
// (remote_syscall.h); unpark_threads() does so too. No error if there is none.
Result<void> finish_remote_call(Pid pid);

// Has a parked thread make the system calls of `act` (remote_syscall.h); afterwards it is parked as
// before. kBusy if no thread is parked; the errors of make_system_calls().
Result<void> call_from_parked_thread(const proc::AddressSpace& space,
                                     const std::function<Result<void>(const SystemCall&)>& act);

// Has this very thread make the system calls of `act`, parked or not; it goes on as before. The
// calls can read `data`, whose address `act` gets; at most kRemoteCallData words. kProcessGone.
Result<void> call_from_thread(
    const proc::AddressSpace& space, Tid thread, std::span<const std::uint64_t> data,
    const std::function<Result<void>(const SystemCall&, std::uint64_t data_address)>& act);
// The same by several that are stopped, one after the other, for the thread that has stopped them.
// The first error ends it; finish_remote_call() is to be called then, when they are let go.
Result<void> call_from_each(const proc::AddressSpace& space, const proc::StoppedThreads& stopped,
                            std::span<const Tid> threads,
                            const std::function<Result<void>(Tid thread, const SystemCall&)>& act);
Result<void> call_from_thread(
    Pid pid, Tid thread, std::span<const std::uint64_t> data,
    const std::function<Result<void>(const SystemCall&, std::uint64_t data_address)>& act);

}  // namespace stasis
