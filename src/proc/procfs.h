// What /proc says about processes, as plain structs. Reads only; no caching; thread-safe.
//
// Everything here is a snapshot: the process may be gone, or be another one with the same number,
// by the time the caller looks at it. A caller that needs certainty holds a Pidfd and compares
// start times.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "proc/process_id.h"

namespace stasis::proc {

struct ProcessInfo {
  Pid pid;
  Pid parent;
  char state = '?';               // R, S, D, T (stopped), t (traced), Z (zombie), X
  int session = 0;                // session id
  int tty = 0;                    // device number of the controlling terminal, 0 if none
  std::uint64_t start_ticks = 0;  // as in ProcessId
  unsigned long flags = 0;        // PF_* of linux/sched.h
  std::uint64_t cpu_ticks = 0;    // of processor time, also of children it has waited for
  int processor = -1;             // where it ran last
  int exit_signal = 0;            // what its parent is told its end by; 0: nothing, or not known
  int exit_code = 0;              // of one that has ended, as wait(2) has it; 0 if not to be seen
  std::string comm;               // the kernel's short name

  ProcessId id() const { return {pid, start_ticks}; }
  // It has, and waits for its parent.
  bool has_ended() const { return state == 'Z' || state == 'X'; }
};

struct ThreadStatus {
  std::uint64_t pending = 0;   // signals that wait for it or its process, a bit each from SIGHUP on
  std::uint64_t blocked = 0;   // those it does not take now
  std::uint64_t switches = 0;  // how often it was taken off a processor: the same twice: it slept
  int tracer = 0;              // the thread that traces it, 0 if none
  int seccomp = 0;             // how its system calls are filtered: 1 strictly, 2 by a program
  bool no_new_privileges = false;  // PR_SET_NO_NEW_PRIVS
};

// A line of /proc/PID/maps.
struct Mapping {
  std::uint64_t start = 0;
  std::uint64_t end = 0;
  std::string permissions;   // "r-xp"
  std::uint64_t inode = 0;   // 0: of no file
  std::string path;          // also "[vdso]"; may be empty
  std::uint64_t device = 0;  // of the file, as makedev(3) has it; not always that of stat(2)
  std::uint64_t offset = 0;  // in the file
};

struct OpenFile {
  int descriptor = -1;
  std::string path;
};

struct UnixSocket {
  std::uint64_t inode = 0;
  std::string path;  // an abstract name begins with "@"; empty if it has none
  bool listens = false;
};

struct InetSocket {
  std::uint64_t inode = 0;  // 0: of no process (closed, or not accepted yet)
  std::uint16_t local_port = 0;
  bool listens = false;         // of TCP
  bool is_established = false;  // else it listens, is being opened, or is being closed
  // "address:port" in the kernel's hexadecimal form; an IPv4 address within IPv6 as IPv4 has it, so
  // that both ends of a connection name each other alike.
  std::string local;
  std::string remote;
};

// One that does not let itself be examined (keeps_its_memory()).
struct HeldProcess {
  Pid pid;
  Pid parent;
  std::string comm;
};

struct ProcessDetails {
  unsigned uid = 0;  // effective user
  int tracer = 0;    // which thread traces it, 0 if none
  int ns_pid = 0;    // its number in its innermost PID namespace
  // Empty for a kernel thread, a zombie, and where the kernel keeps the process's memory
  // (keeps_its_memory()); the first kMostWords.
  std::vector<std::string> argv;
};

// A program can have the kernel show any of its memory as its arguments and its environment
// (PR_SET_MM): what comes after so many bytes, or words, is left out. By its start it may have 6
// MiB of both together (exec's limit, fs/exec.c).
inline constexpr std::size_t kMostWordBytes = 6U << 20;
inline constexpr std::size_t kMostWords = 64U << 10;

// A name in /proc/PID/maps has up to 16 KiB: 4 KiB, and "\\012" for each line break.
inline constexpr std::size_t kLongestPath = 16384;
inline constexpr std::size_t kManyPaths = 16U << 20;
inline constexpr std::size_t kShortPath = 256;

// The inode numbers of those that are sockets.
std::vector<std::uint64_t> socket_inodes(const std::vector<OpenFile>& files);

// `root` is "/proc" but in tests.
// The mapping of an address, without its path, by an open /proc/PID/maps; nothing if there is none.
// kNotSupported before Linux 6.11.
Result<std::optional<Mapping>> mapping_at(const UniqueFd& maps, std::uint64_t address);

// The number by which our user namespace shows files of users that it does not know, root among
// them; nothing where it knows all.
std::optional<uid_t> unknown_owner();
// Whether it knows one user alone, so that no process in it has another's rights.
bool knows_one_user();

class ProcFs {
 public:
  explicit ProcFs(std::string root = "/proc") : root_(std::move(root)) {}

  // kNoSuchProcess if there is none, kNotPermitted if /proc hides it, kNotSupported if /proc is not
  // that of this PID namespace (proc_mount.h), as all() says too. A thread's number is refused with
  // kThreadId, naming its process: /proc/TID exists for threads too, though it is not listed.
  Result<ProcessInfo> process(Pid pid) const;
  // Its state alone, as ProcessInfo has it; of a process that is known to be one. An execve(2) that
  // does not come to its end does not hold this up. kNoSuchProcess, kNotPermitted.
  Result<char> state(Pid pid) const;
  // kNoSuchProcess, kNotPermitted.
  Result<ProcessDetails> details(Pid pid) const;

  // Every process, in no order; those that vanish meanwhile are left out.
  struct Listing {
    std::vector<ProcessInfo> processes;
    std::vector<HeldProcess> held;
  };
  Result<Listing> list() const;
  // The same without those that do not let themselves be examined.
  Result<std::vector<ProcessInfo>> all() const;

  // `root` and all its descendants, parents before children. Zombies are included. kNotPermitted,
  // too, if /proc hides one of them; kBusy if one does not let itself be examined.
  Result<std::vector<ProcessInfo>> tree(Pid root) const;

  // The threads of a process; empty if it is gone.
  std::vector<Tid> threads(Pid pid) const;
  // It runs no more. One that was killed while another traces its threads keeps them, and its
  // pidfd does not say so, until the tracer has waited for each.
  bool has_ended(Pid pid) const;
  // exit(2) of all, or SIGKILL, has come to its threads, which end one after the other.
  bool is_ending(Pid pid) const;
  // For one whose first thread has ended: kZombie, or kNotSupported where others of it run, which
  // then is no process to the driver nor to CRIU.
  Error ended_error(const ProcessInfo& first) const;
  // The same of a thread as process() says of a process. kNoSuchProcess; kIo also for a thread that
  // has ended.
  Result<ProcessInfo> thread(Pid pid, Tid thread) const;
  Result<ThreadStatus> thread_status(Pid pid, Tid thread) const;

  // By address, each as it is read, until `visit` returns false: a process can have gigabytes of
  // this text (65530 mappings of files whose names have 16 KiB), and most callers look for
  // something. Of a path of more than kLongestPath bytes the middle is missing. Of kOfFiles others
  // come too, where the kernel is too old to leave them out. Each 128 are asked for on a thread of
  // their own: a caller that looks into many processes has a KeptCallThread. kNotPermitted,
  // kNoSuchProcess.
  enum class Which { kAll, kOfFiles };  // shared memory is of files
  Result<void> for_each_mapping(Pid pid, const std::function<bool(const Mapping&)>& visit,
                                Which which = Which::kAll) const;
  // All of them. After kManyPaths bytes of paths, each further one is cut to kShortPath.
  Result<std::vector<Mapping>> mappings(Pid pid) const;

  // Does the process map a file whose name begins with `name` ("libcuda.so")? kNotPermitted if
  // its maps may not be read. Reads no further than the first one.
  Result<bool> maps_file(Pid pid, const std::string& name) const;
  // The same of each of these, for the cost of few.
  std::vector<Result<bool>> maps_file_each(const std::vector<Pid>& pids,
                                           const std::string& name) const;

  // "NAME=value" each, as its program was started; what it has set since is not seen.
  // kNotPermitted, kNoSuchProcess.
  Result<std::vector<std::string>> environment(Pid pid) const;

  // The inode numbers of its open sockets. kNotPermitted, kNoSuchProcess.
  Result<std::vector<std::uint64_t>> socket_inodes(Pid pid) const;
  // Those of them that are of TCP, or may be: the table of those (tcp_sockets()) takes 5 ms to read
  // also where it is empty.
  Result<std::vector<std::uint64_t>> tcp_socket_inodes(Pid pid) const;
  // As the kernel names it: "TCP", "TCPv6", "MPTCP", "UNIX-STREAM". Nothing where it is no socket,
  // or cannot be told. Waits for no file that the program serves.
  std::optional<std::string> socket_protocol(Pid pid, int descriptor) const;

  // Its open files, with what each is as the kernel names it: "/dev/null", "socket:[1234]".
  // kNotPermitted, kNoSuchProcess.
  Result<std::vector<OpenFile>> open_files(Pid pid) const;
  // All unix sockets of the process's network namespace. kNotPermitted, kNoSuchProcess.
  // With `named`, those in whose line that stands: any user can make tens of thousands.
  Result<std::vector<UnixSocket>> unix_sockets(Pid pid, std::string_view named = {}) const;

  // The same of TCP sockets, of IPv4 and IPv6. Where the kernel has no IPv6, of IPv4.
  Result<std::vector<InetSocket>> tcp_sockets(Pid pid) const;
  // Of UDP, those that are bound.
  Result<std::vector<InetSocket>> udp_sockets(Pid pid) const;

  // The thread that traces the process or one of its threads; nothing if none does.
  std::optional<int> tracer(Pid pid) const;

  // When the process was started, in seconds since 1970. kIo.
  Result<std::int64_t> started(const ProcessInfo& info) const;

  // Whether this process is in a user namespace of its own, whose root has no rights beyond it. The
  // first one has all numbers, each as itself.
  bool in_own_user_namespace() const;

  // What this process may do: a bit for each capability of linux/capability.h. kIo.
  Result<std::uint64_t> effective_capabilities() const;
  Result<std::uint64_t> permitted_capabilities() const;

  // Bytes of the process's memory that are in RAM now.
  Result<std::uint64_t> resident_bytes(Pid pid) const;

  // Bytes of private memory that belong to no file, in RAM or swapped out.
  Result<std::uint64_t> anonymous_bytes(Pid pid) const;

  // Bytes the process could take without swapping (MemAvailable of /proc/meminfo).
  Result<std::uint64_t> memory_available() const;
  // Bytes of swap that are free.
  Result<std::uint64_t> swap_free() const;

 private:
  Result<std::uint64_t> own_capabilities(const char* set) const;
  Result<std::vector<std::string>> words(Pid pid, const std::string& name) const;
  Result<std::vector<InetSocket>> inet_sockets(Pid pid, std::string_view protocol) const;
  Result<void> check_children(Pid parent, const std::set<Pid>& seen) const;
  // A figure of /proc/meminfo, in bytes.
  Result<std::uint64_t> meminfo(std::string_view key) const;

  std::string root_;
};

// Why a file of /proc/PID could not be read: one that vanishes gives ENOENT at open or ESRCH at
// read; anything else (no descriptors left, no memory) means that we could not ask, not that there
// is no process.
Error why_unread(const std::string& root, Pid pid, Error why);
// kBusy: a thread of the process keeps the lock of its mappings, or holds up an execve(2), and with
// it all who look into its memory (base/call_within.h).
Error keeps_its_memory(Pid pid);

// Parses one line of /proc/PID/stat; kInternal if it is none. Split out for tests: the name may
// hold blanks and brackets.
Result<ProcessInfo> parse_stat(const std::string& line);

// By how many clock ticks the text of /proc/self/timens_offsets shifts the time since boot; may
// wrap, as of a negative one.
std::uint64_t boot_offset_ticks(const std::string& timens_offsets);

// For how many seconds that process has lived, in whatever time namespace this one is.
double age_of(const ProcessInfo& process);

// As uname(2) gives it: "6.18.44-generic".
std::string kernel_release();

// May this process trace `pid`, as the driver and CRIU do? Asks the kernel itself by reading
// nothing from it (process_vm_readv checks like PTRACE_ATTACH: user, CAP_SYS_PTRACE, yama,
// namespaces).
bool may_trace(Pid pid);

// By which the kernel tells PID namespaces apart; 0 if that of the process cannot be seen.
ino_t pid_namespace_of(Pid pid);
// Of the PID namespace that the machine has started with, in which all processes are seen
// (PROC_PID_INIT_INO of linux/proc_ns.h).
inline constexpr ino_t kInitialPidNamespace = 0xEFFFFFFC;

// Does CRIU need to be told that the tree hangs on a terminal of another session (`--shell-job`)?
// So it is when the root's session leader is outside of the tree, or when the tree has a
// controlling terminal.
bool is_shell_job(const std::vector<ProcessInfo>& tree);

}  // namespace stasis::proc
