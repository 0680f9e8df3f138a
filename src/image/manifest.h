// What an image says about itself: the plain data of manifest.json, its writer and its strict
// reader. docs/image-format.md is the specification; this file follows it.
//
// Plain values; a const Manifest may be read from several threads.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/cuda_state.h"
#include "base/ids.h"
#include "base/phases.h"
#include "base/result.h"
#include "image/criu_options.h"

namespace stasis {

// The newest format that this code reads, and the one that it writes.
inline constexpr int kImageFormat = 1;

// Whether an image survives a loss of power at the moment it is said to be complete.
enum class SyncPolicy {
  kDisk,      // every file and directory is fsynced before the image gets its name
  kNone,      // left to the kernel's write-back
  kDeferred,  // kDisk to a reader of the manifest; ImageWriter::sync() does it once the job runs
};

struct GpuRecord {
  std::string uuid;                // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
  std::string name;                // "NVIDIA H100 80GB HBM3"
  std::uint64_t total_memory = 0;  // bytes
  std::string pci_bus_id;          // "00000000:18:00.0"
  bool operator==(const GpuRecord&) const = default;
};

struct GpuMemoryRecord {
  std::string gpu_uuid;
  std::uint64_t bytes = 0;
  bool operator==(const GpuMemoryRecord&) const = default;
};

// What the kernel keeps for a thread, and CRIU does not: values that are not the default.
struct ThreadStateRecord {
  Tid thread;
  std::string cpus;                       // "0-3,7"; empty: where the restore lets it run
  std::uint32_t io_priority = 0;          // as ioprio_get() has it
  std::uint64_t timer_slack = 50000;      // nanoseconds; what a thread of the first process has
  std::string memory_policy = "default";  // as in numa_maps: "bind:0-1"
  std::uint32_t personality = 0;
  std::string machine_check;     // "early", "late"; empty: as the machine does
  std::uint64_t slice = 0;       // nanoseconds, of sched_setattr(); 0: the machine's
  std::uint32_t least_load = 0;  // utilisation clamps
  std::uint32_t most_load = 1024;
  bool operator==(const ThreadStateRecord&) const = default;
};

// A timerfd that CRIU does not restore as it was.
struct TimerRecord {
  int descriptor = -1;
  int clock = 0;
  int flags = 0;                    // of timerfd_settime()
  std::uint64_t left = 0;           // microseconds; 0: has expired, and was not read
  std::uint64_t interval = 0;       // nanoseconds
  std::uint64_t ticks = 0;          // expirations that were not read
  std::uint64_t clock_at_dump = 0;  // microseconds, as the process saw it
  bool operator==(const TimerRecord&) const = default;
};

// An open file that CRIU does not restore as it was.
struct FileStateRecord {
  int descriptor = -1;
  bool exclusive = false;               // a terminal: TIOCEXCL
  std::uint32_t poll_microseconds = 0;  // an epoll: EPIOCSPARAMS
  std::uint32_t poll_budget = 0;
  bool poll_prefer = false;
  std::string locked_settings = {};  // a terminal: proc::FileState's, two digits for each byte
  bool signals = false;              // O_ASYNC, which has to be set by the process
  std::uint32_t owner_thread = 0;    // that it signals (F_OWNER_TID); 0: none
  std::uint32_t value_high = 0;      // an eventfd: the upper half of its value
  // A pipe: what is not as of a new one of the user who has dumped.
  std::optional<std::uint32_t> mode = {};
  std::optional<std::uint32_t> uid = {};
  std::optional<std::uint32_t> gid = {};
  bool stopped = false;        // a terminal: what is written to this end is stopped (TCOOFF)
  bool stop_typed = false;     // a master: what is written to its slave is, by ^S
  std::uint32_t in_speed = 0;  // a master: the terminal's speeds, if one has no name (BOTHER)
  std::uint32_t out_speed = 0;
  bool operator==(const FileStateRecord&) const = default;
};

// A unix socket that listens, with whose credentials of its own the process has to do it again:
// those who connect see them (SO_PEERCRED).
struct ListenerRecord {
  int descriptor = -1;
  int backlog = 0;
  bool operator==(const ListenerRecord&) const = default;
};

// Memory that is locked (mlock).
struct LockedRecord {
  std::uint64_t start = 0;
  std::uint64_t size = 0;
  bool operator==(const LockedRecord&) const = default;
};

// What only the process itself can tell and set.
struct OwnStateRecord {
  std::uint64_t processor_state = 0;  // a bit for each part that it may use by ARCH_REQ_XCOMP_PERM
  std::uint32_t deny_new_code = 0;    // the flags of PR_SET_MDWE; 0: not set
  int lock_new = 0;                   // of mlockall(): MCL_FUTURE, or that and MCL_ONFAULT
  bool merge_memory = false;          // PR_SET_MEMORY_MERGE
  bool advised_huge_pages = false;    // PR_THP_DISABLE_EXCEPT_ADVISED
  // The size of its futex table (PR_FUTEX_HASH), where it is not one that the kernel chooses.
  std::optional<std::uint32_t> futex_slots = {};
  std::vector<ListenerRecord> listeners = {};
  std::vector<LockedRecord> locked = {};
  bool operator==(const OwnStateRecord&) const = default;
};

struct KernelStateRecord {
  std::optional<std::uint32_t> core_dump_filter;
  std::vector<ThreadStateRecord> threads;  // the others have the defaults
  std::vector<TimerRecord> timers;
  std::vector<FileStateRecord> files = {};
  OwnStateRecord own = {};
  int autogroup_nice = 0;  // of the session that it leads (sched(7))
  std::optional<std::uint32_t> audit_session = {};
  bool operator==(const KernelStateRecord&) const = default;
};

struct ProcessRecord {
  Pid pid;
  Pid parent;  // 0 for a process whose parent is outside the image
  // argv, for people: its writer cuts what is long, and bytes that are no UTF-8 become U+FFFD.
  std::vector<std::string> command;
  bool cuda = false;
  // What it was in before the dump began, and is brought back to after a restore; not kFailed. Set
  // exactly if `cuda`.
  std::optional<CudaState> cuda_state;
  std::vector<GpuMemoryRecord> gpu_memory;  // empty if unknown
  // The threads besides the first, which has the number `pid`: a restore needs their numbers, too.
  // Empty also if unknown.
  std::vector<Tid> threads = {};
  // The TCP ports it listens on; empty also if unknown.
  std::vector<std::uint16_t> tcp_ports = {};
  std::optional<KernelStateRecord> kernel_state = {};  // nothing in older images
  bool operator==(const ProcessRecord&) const = default;
};

struct FileRecord {
  std::string path;        // "criu/<name>": relative, two components, no links on the way
  std::uint64_t size = 0;  // bytes
  std::string checksum;    // 32 hexadecimal digits, see image/checksum.h
  bool operator==(const FileRecord&) const = default;
};

// The content of GPU memory that is in gpu/, or that of host memory in host/, and not in CRIU's
// files.
struct ContentRecord {
  std::uint64_t index_size = 0;           // bytes of the index
  std::string index_checksum;             // that it closes with: 32 hexadecimal digits
  std::vector<std::uint64_t> data_sizes;  // bytes of data-00, data-01, ...
  // So many of the data files, the last ones, are those of an earlier image (hard links).
  std::uint64_t reused_files = 0;
  bool operator==(const ContentRecord&) const = default;

  std::uint64_t total_bytes() const;
  std::uint64_t reused_bytes() const;  // of the files that are those of an earlier image
};

// The job that `stasis run --images-dir` looks after, of which the image is one of several.
struct JobRecord {
  std::vector<std::string> command;  // as it was given to `stasis run`
  // What CRIU calls its standard input, output and error, "pipe:[1234]": a restore puts others in
  // their place.
  std::vector<std::string> streams;
  bool operator==(const JobRecord&) const = default;
};

// An option of a socket that has not its default. The bytes are as getsockopt(2) gives them; of an
// option that names an interface, they are the name of that interface.
struct SocketOptionRecord {
  int level = 0;
  int name = 0;
  std::string value;
  bool operator==(const SocketOptionRecord&) const = default;
};

// A multicast group that a socket has joined.
struct MulticastRecord {
  std::string interface;  // its name
  std::string group;      // an address of IPv4 or IPv6
  // Only from these (true), or from all but these.
  bool include = false;
  std::vector<std::string> sources;
  bool operator==(const MulticastRecord&) const = default;
};

// What CRIU does not restore of a socket. Another descriptor may be the same socket.
struct SocketRecord {
  Pid pid;
  int descriptor = -1;
  int domain = 0;  // AF_*, SOCK_*, IPPROTO_*
  int type = 0;
  int protocol = 0;
  std::vector<SocketOptionRecord> options;
  std::vector<MulticastRecord> memberships;
  // fchmod(2), fchown(2): where they are not what a socket of the user who dumped would have.
  std::optional<std::uint32_t> mode = {};
  std::optional<std::uint32_t> uid = {};
  std::optional<std::uint32_t> gid = {};
  // Of netlink: the groups to which it sends (connect(2)).
  std::optional<std::uint32_t> peer_groups = {};
  bool operator==(const SocketRecord&) const = default;
};

struct SocketsRecord {
  // Those of this machine that the sockets are bound to, and those of TCP connections. Neither
  // loopback nor "any"; empty if the processes had a network of their own, which CRIU brings along.
  std::vector<std::string> addresses;
  std::vector<std::string> connection_addresses;
  std::vector<SocketRecord> sockets;
  // What an image cannot hold, for people: "process 12 (descriptor 5): datagrams ...".
  std::vector<std::string> lost;
  bool operator==(const SocketsRecord&) const = default;
};

// The image is one of several that a dump of a job of several nodes has made, a part each.
struct GroupRecord {
  std::string id;  // of that dump
  std::uint32_t parts = 0;
  std::string name;  // of this part
  // TCP connections with other parts, "OWN OTHER" (operations/part_links.h). Their sockets come
  // back locked, and want the other parts to come back as well.
  std::vector<std::string> links = {};
  std::vector<std::string> closing_links = {};
  bool links_may_lead_out = false;  // some may be with others
  bool operator==(const GroupRecord&) const = default;
};

struct Manifest {
  std::string stasis_version;
  std::string created;  // UTC, "2026-11-21T09:30:00Z"; seal() sets it if empty
  std::string hostname;
  std::string kernel_release;  // uname -r
  int criu_version = 0;        // 40201 is 4.2.1
  std::string driver_version;  // "580.159.04"
  int cuda_version = 0;        // cuDriverGetVersion: 13000 is 13.0
  bool simulated = false;      // made on the simulated GPU
  std::vector<GpuRecord> gpus;
  Pid root;
  std::vector<ProcessRecord> processes;  // the root is one of them
  CriuOptions criu_options;              // what the dump used; the restore uses the same
  SyncPolicy sync = SyncPolicy::kDisk;
  std::vector<PhaseRecord> phases;
  // What went on beside each other within the phases, each with its beginning.
  std::vector<PhaseRecord> beside;
  std::optional<JobRecord> job;
  std::string job_name;  // by which `stasis suspend NAME` found the root; empty if it had none
  std::optional<SocketsRecord> sockets;  // nothing also if unknown
  std::optional<GroupRecord> group;
  std::vector<FileRecord> files;              // seal() fills these in, sorted by path
  std::optional<ContentRecord> content;       // if there is a gpu/: ContentSummary::record
  std::optional<ContentRecord> host_content;  // if there is a host/, the same
  std::uint64_t total_bytes = 0;  // seal() fills it in: the sum of all sizes, also of the content's
  // Of all processes and their threads.
  std::set<int> numbers() const;
  // Of all that total_bytes sums up.
  std::size_t file_count() const;
  bool operator==(const Manifest&) const = default;
};

// The text of manifest.json, closed by its own checksum. Strings that are no UTF-8 get U+FFFD in
// place of the bad bytes. Cannot fail.
std::string serialize_manifest(const Manifest& manifest);

// Reads what serialize_manifest wrote, from an untrusted source: never throws, never trusts a
// number. kImageCorrupt with the field's name if anything is damaged, missing or out of range;
// kImageVersion if it is whole but of a newer format, or needs a feature this reader lacks.
Result<Manifest> parse_manifest(std::string_view text);

// Closes the text of a JSON object with the trailer that parse_manifest wants (tests, fuzzer).
std::string close_manifest_text(std::string_view object_text);

}  // namespace stasis
