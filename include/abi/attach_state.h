// What the agent of a program that it was brought to while that ran (`stasis attach`) and the tool
// agree on, beside the agent's page: an object in the agent's library, which the tool finds by its
// name and reads through /proc/PID/mem. docs/adr/0053-attach.md.
//
// The tool believes nothing in it: it writes where the agent says, into the agent's own process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stasis::attach {

// The name by which a target's mappings show the library, which is another than that of one that
// was loaded with the program.
inline constexpr char kAttachedLibrary[] = "libstasis-attached.so";
inline constexpr char kAttachStateName[] = "stasis_attach_state";
// int(std::uint64_t): makes all ready and changes nothing of the driver's; AttachAnswer.
inline constexpr char kAttachPrepareName[] = "stasis_attach_prepare";
// The same: called when the hooks are in; the agent makes its page.
inline constexpr char kAttachBeginName[] = "stasis_attach_begin";

inline constexpr std::uint64_t kAttachMagic = 0x6863747461736173;  // "sasattch"
inline constexpr std::uint32_t kAttachVersion = 1;

enum class AttachAnswer : std::int32_t {
  kDone = 0,
  kNoDriver = 1,      // not one libcuda.so.1, or a stub
  kUnknownEntry = 2,  // an entry point does not begin as it should
  kInactive = 3,      // a tool of CUDA's is at work here, or STASIS_AGENT=off
  kNoRoom = 4,        // no memory near the driver's code, or it may not be made executable
};

// How driver 580's entry points begin, all of them (550 to 580 were not compared):
//   push %rbp; mov %rsp,%rbp; push %r12; sub $8,%rsp
inline constexpr std::size_t kEntryBytes = 10;
inline constexpr unsigned char kEntryBegin[kEntryBytes] = {0x55, 0x48, 0x89, 0xe5, 0x41,
                                                           0x54, 0x48, 0x83, 0xec, 0x08};
// Of those the jump to the hook takes the first five. A thread that is to come to one of these two
// bytes would find half an instruction there.
inline constexpr std::uint64_t kEntryBetween[] = {1, 4};

// One entry point: its first word, and what it becomes.
struct EntryPatch {
  std::uint64_t entry;
  std::uint64_t before;
  std::uint64_t after;
};
inline constexpr std::uint32_t kMostEntries = 1024;

// Why memory stays with the driver.
enum AttachLeft : unsigned {
  kLeftSmall,    // less than 2 MiB
  kLeftShared,   // in an area of the driver's with other blocks
  kLeftOther,    // of a pool, of cuMemCreate, managed, a module's, another process's
  kLeftNoRoom,   // no GPU memory for a copy of it
  kLeftAddress,  // its address could not be had, and it went back to the driver there
  kLeftFailed,   // the driver refused something
  kLeftKinds,
};

struct AttachState {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t bytes;    // of this struct
  std::uint64_t patches;  // EntryPatch[]
  std::uint32_t patch_count;

  // Since the hooks are in, and until memory is adopted.
  std::uint32_t calls;   // 1: a call that does work was made
  std::uint32_t graphs;  // 1: a graph was captured, made, changed or launched
  std::uint32_t unused;

  // Of the last adoption.
  std::uint32_t converted_count;
  std::uint32_t left_count[kLeftKinds];
  std::uint64_t converted_bytes;
  std::uint64_t left_bytes[kLeftKinds];
  std::uint64_t lost_bytes;  // whose addresses were not to be had any more
  char message[160];         // of the last answer that is not kDone
};

}  // namespace stasis::attach
