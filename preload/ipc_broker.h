// How another process opens memory of this one: cuIpcGetMemHandle gives it a handle of the agent's,
// which names a socket of this process and a number; behind that the agent of the other process
// gets a descriptor of the memory, or, where the driver serves it, the driver's handle. Of CUDA IPC
// the connection stays for as long as the memory is open there, so that the owner knows: memory
// that is open in two processes cannot leave. cuMemExportToShareableHandle gives a descriptor that
// says the same: a sealed file of memory. Of what is imported by it one connection stays for each
// owner.
//
// The socket is abstract, made at the first cuIpcGetMemHandle, and served by a thread. CRIU dumps
// one that listens. Only the same user and root are answered.
#pragma once

#include <optional>
#include <vector>

#include "eviction_internal.h"
#include "gate.h"

namespace stasis::preload {

// The handle that the program passes on; null: the socket or its thread cannot be had.
std::optional<cuda::CUipcMemHandle> handle_of_share(cuda::CUdeviceptr address);
// The same of the driver's own, of that context.
std::optional<cuda::CUipcMemHandle> handle_of_driver_share(cuda::CUdeviceptr address,
                                                           cuda::CUcontext context);
// With the tables locked. The descriptor that the program passes on; below 0: the socket, its
// thread or a descriptor cannot be had.
int descriptor_of_share(Physical& physical);
// What such a handle or descriptor names; nothing if it is not of the agent's kind.
std::optional<ShareKey> key_of(const cuda::CUipcMemHandle& handle);
std::optional<ShareKey> key_of_descriptor(int fd);
// A small piece, which others open with the whole unit that it lies in.
struct SmallPiece {
  std::uint32_t offset = 0;
  std::uint32_t asked = 0;
};
// As the handle says, which may have been altered.
std::optional<SmallPiece> piece_of(const cuda::CUipcMemHandle& handle);
bool is_own(const ShareKey& key);
bool is_own_locked(const ShareKey& key);  // with the tables locked
// What the agents of others know this process's piece by; nothing if it was never exported. Several
// if the program has closed the socket in between, and so made another necessary: what others have
// imported is known to them by the first. With the tables locked.
std::vector<ShareKey> keys_of_own(const Physical& physical);
// How many sockets this process has made for that, one after the other.
std::uint32_t services_made();
// Gives a connection of this process's to an owner a name again, by which tools see in
// /proc/net/unix who has memory of that owner's, also when that has ended: CRIU leaves it out.
void name_connection(int connection, std::uint64_t service);
// Whether that process has closed the connection, or has ended, to which this one's has gone. False
// where there is no connection any more. With the tables locked.
bool has_hung_up(int connection, const ShareKey& key);

// While the door is closed no one gets into the queue of those that want to connect, in which CRIU
// finds connections that were given up already, and fails: any user can make such. Our own
// connection takes the only place. The agent disconnects clients that wait, which connect again;
// new ones wait outside. With the gate closed.
void close_door();
void open_door();

struct Fetched {
  cuda::CUresult result = cuda::CUDA_ERROR_INVALID_HANDLE;
  bool answered = false;
  // The driver's handle, or a descriptor to import and the sizes.
  std::optional<cuda::CUipcMemHandle> drivers;
  int memory = -1;
  std::size_t asked = 0;
  std::size_t reserved = 0;
  int connection = -1;  // to be kept for as long as it is open
};
// Asks the owner, and waits for as long as that is suspended: to be called outside the gate. Says
// once on standard error if the owner cannot be reached.
Fetched fetch(const ShareKey& key);

// Whether what was fetched can be used within `pass`. If not it is let go of, and to be fetched
// once more. The gate is closed: the driver may be about to checkpoint this process, which may have
// no descriptor of another's memory then; waits until it is open. Or it closed or opened since it
// said `changes`, before fetch(): the driver may have checkpointed the owner, and this be memory
// that is no more. (Opened: this process's gate may have closed before the owner's, which answered
// in between.)
bool is_of_use(const Fetched& fetched, const ShareKey& key, std::uint32_t changes,
               const Gate::TryPass& pass);

// The owner need not keep it for this process any more.
void end_connection(int connection, const ShareKey& key);
inline void end_connection(const Opening& ended) { end_connection(ended.connection, ended.key); }

// The next three with the tables locked.
// What came over the connection was imported by its descriptor, and is in the tables. A process may
// have hundreds of such: one connection stays for all that it has of an owner's.
void hold_owner(int connection, const ShareKey& key);
// A piece of that owner's is no more in the tables. Ends the connection with the last.
void leave_owner(std::uint64_t service);
// This process as an owner, and how many processes have such memory of it.
ShareKey lending(std::uint32_t& holders);
// Whether another process has memory of this one's by such a descriptor.
bool is_lending();
// In a forked child, whose parent keeps the socket.
void forget_service_after_fork();

}  // namespace stasis::preload
