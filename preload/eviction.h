// What the agent knows of the program's device memory, and how the agent evicts and repopulates it.
//
// Two kinds: what the program asked cuMemAlloc for, which the agent serves from virtual memory
// management (a reserved address range, a piece of physical memory, a mapping), and what the
// program itself makes by virtual memory management, whose handles are the agent's, so that they
// stay valid while the driver's change.
//
// The functions below are for the agent's thread, with the gate closed unless they say otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "driver_calls.h"

namespace stasis::preload {

// Which call of the driver failed, and where. `result` 0: none.
struct Outcome {
  cuda::CUresult result = cuda::CUDA_SUCCESS;
  const char* what = "";
  bool ok() const { return result == cuda::CUDA_SUCCESS; }
};

struct Segment {
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;   // of its content
  std::uint64_t address = 0;  // of its first mapping
  cuda::CUdevice device = 0;
};

struct Inventory {
  std::vector<Segment> segments;
  std::uint64_t bytes = 0;
  std::uint32_t staying = 0;
  std::uint64_t staying_bytes = 0;
};

// Also with the gate open: what there would be to move now.
std::uint64_t movable_bytes();
// Fixes the order of the segments, for all calls below.
Inventory take_inventory();
// Pieces of the driver's own that this process and another one have open by CUDA IPC, which the
// agent cannot give up. At any time.
std::uint32_t shared_pieces();
// All contexts that the program has, for the code that waits for the devices.
std::vector<cuda::CUcontext> known_contexts();
// Streams that are being captured: waiting for a device would spoil the capture.
int captures_in_progress();

Outcome export_segment(std::size_t index, int& fd);
// Gives the physical memory of all segments back. On a failure the agent has taken again what it
// gave back, as far as possible; the content is lost, and the caller brings it back.
Outcome evict_all();
// Takes it again, at the same addresses. All or nothing.
Outcome repopulate_all();
// Between the segments and a buffer in this process.
Outcome copy_all(std::byte* buffer, bool out);
// To the buffer from descriptors of the segments' memory, which may have been given back since they
// were made. The memory's own segments need not be there.
Outcome copy_pinned(std::span<const int> fds, std::byte* buffer);

// In a forked child, where the driver cannot be used any more: forgets everything. If the fork was
// in a handler of a signal that came while its thread was changing the tables, as soon as they are
// whole again: when the child has returned from the handler.
void forget_memory_after_fork();
// Around a fork, so that the child finds the tables whole. By one thread, not within each other.
void lock_memory_for_fork();
void unlock_memory_after_fork();

}  // namespace stasis::preload
