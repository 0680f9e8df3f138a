// What CRIU's error lines mean. The texts are those of CRIU 4.0 to 4.2 (Debian's 4.1.1 and 4.2.1);
// lines marked "seen" were made to happen by criu_integrationtest.cc.
#include <array>
#include <string>
#include <string_view>

#include "criu/criu_log.h"

namespace stasis {
namespace {

using enum ErrorCode;

// In the order in which they are tried. A rule is about a cause: what CRIU only says as a
// consequence ("Dump files (pid: 12) failed with -1") is left out on purpose.
constexpr std::array kRules = {
    // Said only in passing, before CRIU ends without a word. Seen.
    CriuRule{"Effective capability ", " missing", kNotPermitted, "CRIU lacks the rights it needs",
             "run as root, or give criu CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE and CAP_SETPCAP",
             ObstacleId("permissions")},
    // Of the loader, before there is a criu. Seen.
    CriuRule{"error while loading shared libraries", "failed to map segment", kOutOfHostMemory,
             "there is not enough host memory for CRIU",
             "free memory on this machine, or raise the limit of it (ulimit -v)"},
    CriuRule{"error while loading shared libraries", "cannot map zero-fill pages", kOutOfHostMemory,
             "there is not enough host memory for CRIU",
             "free memory on this machine, or raise the limit of it (ulimit -v)"},
    CriuRule{"cannot allocate TLS data structures", "", kOutOfHostMemory,
             "there is not enough host memory for CRIU",
             "free memory on this machine, or raise the limit of it (ulimit -v)"},
    CriuRule{"error while loading shared libraries", "", kCriuFailed,
             "a library that CRIU needs is not there", "install it, or another CRIU"},
    // Restore: process numbers. Seen.
    CriuRule{"Can't fork for ", "File exists", kPidInUse,
             "a process number that the image needs is taken",
             "end the process that has the number (ps -p N), or restore in a new PID namespace "
             "(unshare --pid --fork --mount-proc)"},
    CriuRule{"Pid ", " do not match expected ", kPidInUse,
             "a process number that the image needs is taken",
             "end the process that has the number (ps -p N), or restore in a new PID namespace "
             "(unshare --pid --fork --mount-proc)"},
    // From the restorer; -17 is EEXIST. Thread numbers of images of older versions are not checked.
    CriuRule{"Unable to create a thread: -17", "", kPidInUse,
             "a thread number that the image needs is taken",
             "restore again if the number was taken for a moment only, or restore in a new PID "
             "namespace "
             "(unshare --pid --fork --mount-proc)"},
    CriuRule{" intersects with pid ", "in images", kPidInUse,
             "the session or group of this terminal has a number that the image needs",
             "restore from another shell or under setsid"},
    CriuRule{"Conflict with a dead task with the same PID", "", kPidInUse,
             "a process number that the image needs is taken by a zombie",
             "end the parent of that zombie, then restore again"},

    CriuRule{"Can't chose service_fd_base", "", kCriuFailed,
             "it has descriptors nearer to the limit of open files than CRIU needs for its own",
             "raise the hard limit of the shell that restores it (ulimit -Hn), or restore as root",
             ObstacleId("high-descriptor")},

    CriuRule{"No CTL for TTY", "SCM case", kBusy,  // seen
             "a program has not yet read a descriptor of a terminal that is under way in a unix "
             "socket (SCM_RIGHTS), which CRIU cannot dump",
             "dump again when it has received it", ObstacleId("terminal")},
    // Terminals. Seen.
    CriuRule{"is not a session leader", "--shell-job", kCriuFailed,
             "the process belongs to the session of a shell outside of the image",
             "dump it with --shell-job, or start such programs with setsid"},
    CriuRule{"Found dangling tty", "", kCriuFailed,
             "the process uses a terminal that belongs to a shell outside of the image",
             "dump it with --shell-job, or start it with setsid and its output in files",
             ObstacleId("terminal")},
    CriuRule{"tty: Found slave peer", "without correspond master", kCriuFailed,
             "the process uses a terminal whose other end is outside of the image",
             "dump it with --shell-job, or start it with setsid and its output in files",
             ObstacleId("terminal")},
    CriuRule{
        "Don't have tty to inherit session from", "", kCriuFailed,  // seen
        "the process had a terminal, and there is none here to give it",
        "restore it from a terminal, with standard input not redirected (without one: script -qc "
        "'stasis restore ...' /dev/null)"},
    CriuRule{"A session leader of ", " is outside of its pid namespace", kCriuFailed,
             "the process belongs to a session outside of its container",
             "start it in a session of its own (`setsid COMMAND`), or dump it from outside of the "
             "container, with --shell-job"},

    // Connections.
    CriuRule{"Connected TCP socket", "", kCriuFailed,
             "the process has open TCP connections",  // seen
             "dump it with --tcp-established to keep them, or --tcp-close to drop them",
             ObstacleId("tcp-connection")},
    CriuRule{"Need to set the --tcp-close", "", kCriuFailed,
             "the image holds TCP connections that were dumped to be closed",
             "restore it with --tcp-close"},
    CriuRule{"Non-empty write queue on an in-flight socket", "", kBusy,  // seen
             "a connection to a unix socket that the program has not accepted yet has data in it",
             "dump once more when it has been accepted; or let the program accept it",
             ObstacleId("unix-socket")},
    CriuRule{"Found a closed in-flight socket", "", kBusy,  // seen
             "a connection to a unix socket was closed before the program has accepted it",
             "dump once more when it has been accepted; or let the program accept it",
             ObstacleId("unix-socket")},
    CriuRule{"Control messages in queue", "", kCriuFailed,  // seen
             "messages in a unix socket that tell their sender (SO_PASSCRED) were not read yet",
             "dump once more when they have been read; or do without SO_PASSCRED",
             ObstacleId("unix-socket")},
    CriuRule{"In-flight connection", "", kBusy,  // seen
             "a TCP connection is just being opened", "try again in a moment"},
    CriuRule{"Can't bind inet socket", "Cannot assign requested address", kCriuFailed,  // seen
             "an address that a socket of the job is bound to is not on this machine",
             "give the machine that address (ip address add ADDRESS/32 dev lo), or let the program "
             "listen on all addresses"},
    CriuRule{"Can't bind inet socket", "Address already in use", kCriuFailed,  // seen
             "a port that the job listened on is in use here",
             "end what listens there (ss -ltnp), then restore again"},
    CriuRule{"Can't bind inet socket", "", kCriuFailed,  // seen
             "a socket of the job cannot have its address here",
             "give the machine that address, on the interface on which it was"},
    CriuRule{"unix: Can't bind id", "No such file or directory", kCriuFailed,  // seen
             "the directory of a unix socket's name is not here",
             "make that directory, then restore again"},
    CriuRule{
        "unix: Can't bind id", "", kCriuFailed,  // seen
        "the name of a unix socket of the job is in use here, perhaps by the job itself, which "
        "still runs, or its file cannot be replaced",
        "end the process that has it (ss -xlp), or restore in a network namespace of its own "
        "(unshare --net, then ip link set lo up); where none has it, make the file's directory "
        "writable (chattr -i, mount)"},
    CriuRule{
        "External socket is used", "", kCriuFailed,  // seen
        "the process has a unix socket connected to a process outside of the image",
        "dump that process too, close the connection, or, if it is a named datagram socket, let "
        "it be "
        "cut with --ext-unix-sk",
        ObstacleId("unix-socket")},
    CriuRule{
        "Can't dump half of stream unix connection", "", kCriuFailed,  // seen
        "the process has a unix stream socket connected to a process outside of the image",
        "dump that process too, close the connection, or name it: --external 'unix[NUMBER]', the "
        "number being that of the socket (ls -l /proc/PID/fd)",
        ObstacleId("unix-socket")},
    CriuRule{"External socket found in image", "", kCriuFailed,
             "the image holds a unix socket that was connected to a process outside of it",
             "restore it with --ext-unix-sk"},
    CriuRule{"Can't lookup unix socket", "", kCriuFailed,
             "the process has a unix socket that CRIU cannot find, such as one of another network "
             "namespace",
             "close it before the dump", ObstacleId("foreign-socket")},
    CriuRule{"iptables", "", kCriuFailed, "packets of the TCP connections could not be held back",
             "install nftables, or dump with --network-lock skip if no other program sends"},
    CriuRule{
        "nftables", "", kCriuFailed, "packets of the TCP connections could not be held back",
        "load the kernel's nf_tables, or dump with --network-lock skip if no other program sends"},

    CriuRule{
        "Dump eventpoll (pid: ", " failed with ", kCriuFailed,  // seen
        "an epoll of the process watches a file that the process has no more, and another one has",
        "take a file out of the epoll (EPOLL_CTL_DEL) before it is closed; where it is closed, end "
        "the other process that has it, or let the program make a new epoll",
        ObstacleId("epoll")},

    // Timers and schedulers.
    CriuRule{"Unknown clock type", "", kCriuFailed,  // seen
             "the process has a timerfd by a clock that CRIU does not know (an alarm clock)",
             "use CLOCK_REALTIME or CLOCK_BOOTTIME in timerfd_create()", ObstacleId("timerfd")},
    CriuRule{"Inconsistent sched params", "", kCriuFailed,  // seen
             "a thread was under a scheduler that CRIU cannot restore (SCHED_DEADLINE)",
             "no restore of this image succeeds: start the program anew, and dump it when its "
             "threads are under another one (chrt --other --pid 0 THREAD)",
             ObstacleId("scheduler")},

    // Files. Seen: locks, ghost, link remap, missing, size.
    CriuRule{
        "The bfd buffer is too small", "",
        kCriuFailed,  // seen; a page of memory is for a line
        "a line of /proc is too long for CRIU: the process has a file mapped by a path of some "
        "4000 bytes, of which a line break takes four, or belongs to some hundred groups",
        "move the file to a shorter path, and start the program again; or start it with fewer "
        "groups",
        ObstacleId("long-line")},
    CriuRule{"Some file locks are hold", "", kCriuFailed, "the process holds file locks",
             "dump it with --file-locks", ObstacleId("file-lock")},
    CriuRule{"Can't dump ghost file", "increase limit", kCriuFailed,
             "the process has a deleted file open that is larger than the limit",
             "dump it with a larger --ghost-limit", ObstacleId("deleted-file")},
    CriuRule{"Can't create link remap", "", kCriuFailed,
             "the process has a file open whose name was removed, but which has other names",
             "dump it with --link-remap", ObstacleId("link-remap")},
    CriuRule{"Can't link remap to", "File exists", kCriuFailed,
             "another dump has the name (link_remap) that CRIU gives to a file of the process",
             "try again when that dump has ended; a link_remap.NUMBER that stays is of an image "
             "that criu or an earlier stasis has made: restore that image, or remove both",
             ObstacleId("link-remap-taken")},
    CriuRule{"Can't open file ", "on restore: No such file", kCriuFailed,
             "a file that the process had open is not there",
             "put the file back where it was, with the content it had at the dump"},
    CriuRule{"has bad size", "", kCriuFailed,
             "a file that the process had open is not the one of the dump: its size is another",
             "put back the file as it was at the dump"},
    CriuRule{"has bad build-ID", "", kCriuFailed,
             "a program or library of the process is not the one of the dump",
             "restore with the same versions of the programs and libraries installed"},
    CriuRule{"has bad mode", "", kCriuFailed,
             "a file that the process had open has another mode now",
             "put back the file as it was at the dump"},
    CriuRule{"Can't open file ", "on restore: Permission denied", kNotPermitted,
             "a file that the process had open may not be opened", "restore as the same user"},
    CriuRule{"anon_inode:[io_uring]", "", kCriuFailed,
             "the process uses io_uring, which CRIU cannot dump",
             "start it with `stasis run --no-io-uring`, or turn io_uring off in the program",
             ObstacleId("io-uring")},
    CriuRule{"io_uring", "", kCriuFailed, "the process uses io_uring, which CRIU cannot dump",
             "start it with `stasis run --no-io-uring`, or turn io_uring off in the program",
             ObstacleId("io-uring")},
    // The kernel lets no io_uring through a socket since 6.7: CRIU says only this. Seen.
    CriuRule{"send_fds failed (-22)", "", kCriuFailed,
             "the process has a descriptor that the kernel hands to no other process, most likely "
             "an io_uring",
             "start it with `stasis run --no-io-uring`, or turn io_uring off in the program",
             ObstacleId("io-uring")},
    CriuRule{"anon_inode:", "", kCriuFailed,
             "the process has a kind of descriptor open that CRIU cannot dump",
             "close it before the dump; the line names its kind", ObstacleId("anonymous-file")},
    CriuRule{
        "of that type [20", "/dev/nvidia", kCriuFailed,
        "the process still has the GPU's device files open",
        "its CUDA state must be checkpointed before CRIU dumps it; if it was, another library in "
        "it (NVML, OpenGL) has opened the GPU",
        ObstacleId("gpu-files")},
    CriuRule{"of that type [20", "", kCriuFailed,
             "the process has a device open that CRIU cannot dump", "close it before the dump",
             ObstacleId("device")},
    CriuRule{"of that type [", "", kCriuFailed,
             "the process has a file open of a kind that CRIU cannot dump",
             "close it before the dump", ObstacleId("anonymous-file")},
    CriuRule{
        "handle_device_vma plugin failed", "", kCriuFailed,  // seen
        "a process has memory of a device mapped, most likely the GPU's: one with CUDA whose state "
        "was not checkpointed, one with an NVML of its own, or one forked from a process with CUDA "
        "that was suspended before the dump",
        "resume what is suspended and dump it then; end processes that watch the GPU",
        ObstacleId("gpu-files")},
    CriuRule{
        "Unsupported mapping found", "", kCriuFailed,
        "the process has memory of a kind that CRIU cannot dump, such as a device's",
        "close the device before the dump; if it is the GPU, its CUDA state was not checkpointed",
        ObstacleId("device")},
    CriuRule{"/dev/nvidia", "", kCriuFailed, "the process still has the GPU's device files open",
             "its CUDA state must be checkpointed before CRIU dumps it", ObstacleId("gpu-files")},
    CriuRule{"is autodetected external mount", "", kCriuFailed,
             "a directory is mounted into the container from outside",
             "dump it with --external 'mnt[PATH]:NAME', PATH being where the mount is; its restore "
             "finds "
             "it there, or where --external 'mnt[NAME]:PATH' says",
             ObstacleId("mount")},
    CriuRule{
        "Can't lookup mount=", " path=/memfd:", kCriuFailed,  // seen
        "the process has memory of huge pages open (MFD_HUGETLB), and CRIU did not know it: it "
        "needs a huge page that is free to learn what such memory is",
        "set one more aside: sysctl vm.nr_hugepages", ObstacleId("huge-pages")},
    CriuRule{
        "Can't lookup mount=", " for fd=", kCriuFailed,  // seen
        "the process has a file open that lies on a mount outside of its mount namespace, or a "
        "POSIX message queue",
        "let it open such files itself (</dev/null, and its output to files, after unshare); a "
        "message queue it must close (mq_close) before the dump",
        ObstacleId("mount")},
    CriuRule{
        "No mapping for ", "mountpoint", kCriuFailed,
        "a directory was mounted into the process from outside, and no option says what is in its "
        "place now",
        "restore it with --external 'mnt[NAME]:PATH', NAME being that of the dump"},

    // Who else holds the process, and who may.
    CriuRule{"task not stopped after seize", "", kBusy, "the process could not be stopped",
             "try again; a debugger or another dump may be at work on it"},
    CriuRule{"Unable to interrupt task", "", kBusy,  // seen
             "another program traces the process, or this user may not stop it",
             "end the debugger or tracer (strace, gdb) that holds it; or run as root",
             ObstacleId("tracer")},
    CriuRule{"Timeout reached. Try to interrupt", "", kCriuFailed,  // seen
             "a process could not be stopped in time: a thread of it is in a system call that "
             "nothing interrupts, or executes a program whose file does not come (FUSE, NFS)",
             "see which one (`ps -eLo pid,tid,stat,wchan`), and try again when it has gone on"},
    CriuRule{"SEIZE ", "", kBusy, "the process could not be stopped",
             "end a debugger or tracer (strace, gdb) that holds it, then try again",
             ObstacleId("tracer")},
    CriuRule{
        "ptrace", "Operation not permitted", kNotPermitted,
        "this user may not stop the process, or another program traces it",
        "run as root or with CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE; end any debugger first"},
    CriuRule{"CAP_CHECKPOINT_RESTORE", "", kNotPermitted, "CRIU lacks the rights it needs",
             "run as root, or give criu CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE and CAP_SETPCAP",
             ObstacleId("permissions")},
    CriuRule{"prlimit", "Operation not permitted", kNotPermitted,
             "the limits of the process may not be read or set",
             "run as root with CAP_SYS_RESOURCE, or as the user who owns the process",
             ObstacleId("permissions")},
    CriuRule{"Can't get rlimit", "", kNotPermitted, "the limits of the process may not be read",
             "run as root with CAP_SYS_RESOURCE, or as the user who owns the process",
             ObstacleId("permissions")},
    CriuRule{"ns_last_pid", "", kNotPermitted, "CRIU may not choose process numbers",
             "run as root or with CAP_CHECKPOINT_RESTORE", ObstacleId("permissions")},
    CriuRule{"map_files is inaccessible", "", kNotPermitted,
             "CRIU may not read the process's mappings",
             "run as root or with CAP_CHECKPOINT_RESTORE", ObstacleId("permissions")},

    // The machine.
    CriuRule{"No space left on device", "", kNoSpace, "the disk is full",
             "free space there, or dump to another disk"},
    CriuRule{"Disk quota exceeded", "", kNoSpace, "the disk quota is used up",
             "free space there, or dump to another disk"},
    CriuRule{"Too many open files", "", kCriuFailed,
             "the limit of open files is too low for CRIU",  // seen
             "raise it (ulimit -n 65536), then try again"},
    CriuRule{
        "File too large", "", kCriuFailed,
        "a file of the image would be larger than the limit (ulimit -f) or the file system allows",
        "raise the limit (ulimit -f unlimited), or dump to another file system"},
    CriuRule{"Tracking memory is not available", "", kCriuFailed,
             "the kernel lacks CONFIG_MEM_SOFT_DIRTY", "use a kernel that has it",
             ObstacleId("kernel")},
    CriuRule{"soft-dirty", "", kCriuFailed, "the kernel lacks CONFIG_MEM_SOFT_DIRTY",
             "use a kernel that has it", ObstacleId("kernel")},
    CriuRule{"vdso: ", "", kCriuFailed, "this CRIU does not understand the kernel's vDSO",
             "use a newer CRIU (`stasis-get-criu`), and restore on the kernel of the dump"},
    CriuRule{"CPU capabilities do not match", "", kCriuFailed,
             "the processor here lacks what the one of the dump had",
             "restore on the same kind of processor"},
    CriuRule{"CPU instruction capabilities do not match", "", kCriuFailed,
             "the processor here lacks what the one of the dump had",
             "restore on the same kind of processor"},
    CriuRule{"xsave", "", kCriuFailed, "the processor here lacks what the one of the dump had",
             "restore on the same kind of processor"},
    CriuRule{"Cannot allocate memory", "", kOutOfHostMemory, "host memory ran out",
             "free memory on this machine"},
    CriuRule{"Can't allocate ", " bytes", kOutOfHostMemory, "host memory ran out",  // seen
             "free memory on this machine, or raise the limits (`ulimit -v`)"},

    // Namespaces and control groups.
    CriuRule{"can only be restored in a new pid namespace", "", kCriuFailed,
             "the image holds a whole PID namespace", "restore it with its container engine"},
    CriuRule{
        "pid namespace without the process init", "", kCriuFailed,
        "the process runs in a container's PID namespace, and the container's first process is "
        "not part of the tree",
        "use the container engine's checkpoint, or dump it from inside the container",
        ObstacleId("pid-namespace")},
    CriuRule{"Can't dump nested", "namespace", kCriuFailed,
             "the tree has namespaces of its own inside", "dump the inner tree by itself",
             ObstacleId("namespace")},
    CriuRule{"Can't dump a process with different", "", kCriuFailed,
             "the processes of the tree live in different namespaces",
             "dump the container as a whole with its engine", ObstacleId("namespace")},
    CriuRule{"cg: ", "", kCriuFailed, "the control groups of the process could not be dealt with",
             "use --manage-cgroups ignore"},
    CriuRule{"Unable to open directory", "", kCriuFailed,
             "CRIU's directory for plugins is not there",
             "report this: Stasis names a directory of its own"},
};

bool matches(const CriuRule& rule, std::string_view line) {
  const std::size_t at = line.find(rule.first);
  if (at == std::string_view::npos) return false;
  return rule.second.empty() ||
         line.find(rule.second, at + rule.first.size()) != std::string_view::npos;
}

}  // namespace

std::span<const CriuRule> criu_rules() { return kRules; }

std::optional<CriuDiagnosis> diagnose_criu_line(std::string_view line) {
  for (const CriuRule& rule : kRules) {
    if (matches(rule, line)) {
      return CriuDiagnosis{rule.code, std::string(rule.meaning), std::string(rule.remedy),
                           std::string(line), rule.obstacle};
    }
  }
  return std::nullopt;
}

}  // namespace stasis
