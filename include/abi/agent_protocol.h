// What the agent inside a target (preload/) and the tools share: one page of memory, and the
// protocol over it.
//
// The page is a memfd of the target's, named below. A tool finds it among the target's descriptors,
// opens it anew through /proc, which the kernel allows to the same user and to root only, and holds
// flock() on that: one peer at a time, and the agent sees when the peer has died, in any namespace.
// There is no socket, and so nothing that CRIU could not dump or that would have to be closed for
// it. docs/adr/0017-agent.md.
//
// One request at a time: the peer writes `command` and `arguments`, increments `request` and wakes
// the agent by futex; the agent answers by setting `reply` to the same number and waking the peer.
// The file is sealed: it can neither shrink nor grow, so that a peer that maps it never reaches
// past its end. All numbers are those of the machine; version 4 of the page is the layout of
// ControlPage. Magic, version, pid and state lie where they lie in all versions, so that every
// tool sees whether the memory of a process is there.
#pragma once

#include <fcntl.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace stasis::direct {

inline constexpr int kAgentSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
inline constexpr char kAgentMemfd[] = "stasis-agent";
inline constexpr std::uint64_t kAgentMagic =
    0x746e656761736173;  // "sasagent", as it lies in memory
inline constexpr std::uint32_t kAgentVersion = 4;
// Descriptors exported at a time: they count towards the target's limit of open files.
inline constexpr std::uint32_t kExportBatch = 64;
// Entries of `shares` at a time.
inline constexpr std::uint32_t kShareBatch = 16;

enum class AgentState : std::uint32_t {
  kRunning = 0,  // the gate is open, all memory is there
  kClosed = 1,   // no thread of the program is in a call of the driver that touches device memory
  // Closed, and the content of device memory is only in `buffer`, in memory that the agent has
  // pinned (kPin), or elsewhere.
  kEvicted = 2,
  // As kEvicted, but the driver is about to hold the process, or does. The agent no longer checks
  // whether its peer lives: it could not call the driver.
  kHeld = 3,
  kFilling = 4,  // device memory is there again, its content not yet or in part
};

enum class AgentCommand : std::uint32_t {
  kNone = 0,
  // The agent says how much is there now, and makes a buffer for it. The gate stays as it is.
  // arguments: 1 if the content will go elsewhere: no buffer.
  kPrepare = 1,
  kClose = 2,   // arguments: milliseconds to wait. Closes the gate, waits for the device
  kExport = 3,  // arguments: index of the first segment. Fills `segments`
  // Gives the device memory back to the device, keeps the addresses. arguments: where the content
  // is, as `content_id` says.
  kEvict = 4,
  kHold = 5,        // kEvicted -> kHeld
  kRepopulate = 6,  // takes device memory again, at the same addresses
  // 7 was a copy in the other direction.
  kCopyIn = 8,  // the agent copies by itself, buffer to device; slower than a peer could
  // Opens the gate, gives the buffer back. arguments: kKeepBuffer to keep it.
  kOpen = 9,
  kBuffer = 10,  // has a buffer for a peer that brings the content, but cannot copy it in
  // kClosed: keeps a descriptor of each segment, which keep the memory and its content on the
  // device when kEvict has given it up, also if every other process dies. kExport names these from
  // then on, and kRepopulate takes the content from them. Refused if there are too many for the
  // program's limit.
  kPin = 11,
  // The content is in the buffer: lets the descriptors go. Also while the driver holds.
  kUnpin = 12,

  // Memory that processes share (docs/adr/0046-shared-memory.md).
  // Says what this process shares, from the entry `arguments[0]` on. Fills `shares`.
  kShares = 13,
  // kClosed: gives up all imported memory, and memory of the host's from cuMemCreate and managed
  // memory, whose content the process keeps; keeps the addresses. The gate does not open any more
  // before kRetake and kAttach have brought all of it back. arguments: bytes of the host's memory
  // that managed memory may take meanwhile; 0: as many as it has.
  kDetach = 14,
  // A descriptor of this process's own piece that has the id in `arguments`, in `shares[0]`.
  kLend = 15,
  // `arguments[0]` kOffer: makes a pair of sockets. The peer takes the one in `shares[0]`, and
  // sends descriptors over it, each with the id of its piece. kTake: imports these, and maps them
  // where they were.
  kAttach = 16,
  kRetake = 17,  // takes the host's, managed and inherited memory again
  // kClosed, of an agent that came later, when the driver has waited for all calls that came past
  // its hooks. `arguments[0]` kLook: finds out what memory there is. kExchange: exchanges what it
  // can for memory of its own at the same addresses, and serves memory from then on; the peer keeps
  // the program's threads still meanwhile.
  kAdopt = 18,
  // kClosed: this process has imported the piece with the id in `arguments`, and its owner has
  // ended or has freed it. Saves its content; kDetach gives it up then, and makes the process its
  // owner, which kRetake takes again. An agent that does not know it answers
  // CUDA_ERROR_NOT_SUPPORTED, as to kStay.
  kInherit = 19,
  // kClosed: the gate does not open any more without a peer, as after kDetach.
  kStay = 20,
};

// Where an agent comes from.
enum class AgentOrigin : std::uint32_t {
  kStarted = 0,  // it was loaded with the program (`stasis run`)
  kHooked = 1,   // it came later, and all memory is the driver's until it is told to adopt
  kAttached = 2,
};

// The peer will ask to close again soon. An agent that does not know this argument makes another
// buffer then.
inline constexpr std::uint64_t kKeepBuffer = 1;

// A piece of device memory that can leave.
struct AgentSegment {
  std::uint64_t bytes;
  std::uint64_t offset;   // of its content in the buffer
  std::uint64_t address;  // in the target; of several mappings of it, the first; 0: none
  std::uint8_t gpu[16];   // the UUID of the device it is on
  std::int32_t fd;        // the target's descriptor of it, valid until the next command; -1: none
  std::uint32_t
      reserved;  // in the last one: the agent writes it to see whether the page is its file's
};

// A unit of managed memory, as the driver takes addresses for it (580).
inline constexpr std::uint64_t kManagedArea = std::uint64_t{32} << 20;

inline constexpr std::uint64_t kOffer = 0;
inline constexpr std::uint64_t kTake = 1;

inline constexpr std::uint64_t kLook = 0;
inline constexpr std::uint64_t kExchange = 1;

// What a piece is known by in all processes that share it: a random number of the process that has
// made it, and the piece's number there.
using ShareId = std::array<std::uint64_t, 2>;

// How a process has a piece that is shared.
enum class ShareRole : std::uint32_t {
  kOwner = 0,     // it has made the memory, and others may have imported it
  kImporter = 1,  // the memory is another process's
  kForeign = 2,   // an importer's, and the agent does not know of whom: it cannot be brought back
  // It is an owner's that has inherited it (kInherit), and has not taken it again yet.
  kHeir = 6,
  // This process's own, and a device or a process that no agent reaches has it, which is not told
  // when it moves: a dma-buf, a fabric handle.
  kOutside = 5,
  // Of no single piece, the second word of the id being 0. What is imported by descriptor has no
  // connection to its owner for each piece, but one for all that a process has of another's.
  kLender = 3,  // `open`: how many others have memory of this process's
  kHolder = 4,  // this process has memory of that one's
};

// The abstract socket on which an agent is asked for memory: behind this the first word of the ids,
// in 16 hexadecimal digits.
inline constexpr char kShareSocket[] = "stasis-ipc-";

// The owner of what is there has ended, or has closed the connection.
inline constexpr std::uint32_t kOwnerLost = 1;
// It is not there (kDetach).
inline constexpr std::uint32_t kGivenUp = 2;

struct AgentShare {
  ShareId id;
  std::uint64_t bytes;
  ShareRole role;
  std::uint32_t open;  // an owner's: how often other processes have it open by CUDA IPC; kLender;
                       // an importer's: kOwnerLost, kGivenUp or 0
  std::int32_t fd;     // the target's descriptor, of kLend and kAttach; -1: none
  std::uint32_t of_host;  // not 0: memory of the host's from cuMemCreate
};

// Whether a tool has the program's memory mapped while the program runs, to pre-copy it for a
// save.
enum class PrecopyState : std::uint32_t {
  kUnknown = 0,  // the agent is of an earlier version and does not look
  kNo = 1,
  kCopies = 2,  // written by the tool
  kEnds = 3,    // the agent's wish: the program is giving memory back, and waits. A futex
};

struct ControlPage {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t bytes;  // of this struct
  // The owner's numbers, in its own PID namespace; a forked child holds the descriptor as well.
  std::int32_t pid;
  std::int32_t tid;  // the agent's thread

  std::atomic<std::uint32_t> request;
  std::atomic<std::uint32_t> reply;
  AgentCommand command;
  // The number of a request that its peer has cancelled: kClose ends soon, as at its deadline.
  std::atomic<std::uint32_t> abandoned;
  std::uint64_t arguments[2];
  std::atomic<PrecopyState> precopy_state;
  // Sockets on which the agent has ever listened for those that want memory. If the process has
  // fewer, the program has closed some, and may still have what it gave out there.
  std::uint32_t services;
  // Of so many MiB of device memory a tool has seen that less than half is zeros: it is not worth
  // it to look again before there is much more. 0: not known. Written by tools.
  std::atomic<std::uint32_t> few_zeros;
  AgentOrigin origin;

  // The answer. `cu_result` 0: done. Otherwise `message` says what could not be done.
  std::uint32_t cu_result;
  // Pieces that the driver has opened here and in another process by CUDA IPC, which the agent
  // cannot give up.
  std::uint32_t driver_share_count;
  char message[160];

  std::atomic<AgentState> state;
  std::uint32_t segment_count;   // of all, as of the last kPrepare or kClose
  std::uint64_t segment_bytes;   // together
  std::uint64_t buffer_address;  // in the target; 0: none
  std::uint64_t buffer_bytes;
  std::uint32_t staying_count;   // pieces that could not leave: shared with other processes
  std::uint32_t exported_count;  // entries of `segments`
  std::uint64_t staying_bytes;
  // Not zero: the content is not in `buffer` but in an image, of which this is the checksum of the
  // index (docs/image-format.md). Only a peer that finds it can bring it back.
  std::uint64_t content_id[2];
  // The driver has held the process once, or was about to: a kernel of it may be one that the GPU
  // cannot switch away from (mover_server.h). Written by tools.
  std::atomic<std::uint32_t> held_before;
  // The number of descriptors that the agent has pinned (kPin). While there are any in kHeld, the
  // content is nowhere else, and the device's memory is not free.
  std::uint32_t pinned_count;
  std::uint32_t share_count;      // pieces that kDetach or others are about, and imports since
  std::uint32_t detached_count;   // of those, the ones that are not there
  std::uint32_t multicast_count;  // multicast objects (NVLink SHARP) that the program has
  // Managed memory that kDetach gives up too, in areas of the driver's (kManagedArea). While it
  // does and while kRetake takes it again, the peer keeps the program's threads still. 0: of an
  // agent that does not know how.
  std::uint32_t managed_areas;
  AgentShare shares[kShareBatch];
  AgentSegment segments[kExportBatch];
};

static_assert(sizeof(std::atomic<std::uint32_t>) == 4 &&
              std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(offsetof(ControlPage, segments) == 328 + sizeof(AgentShare) * kShareBatch,
              "a change of the layout is a new version");
static_assert(offsetof(ControlPage, version) == 8 && offsetof(ControlPage, pid) == 16 &&
                  offsetof(ControlPage, state) == 240,
              "in all versions");

}  // namespace stasis::direct
