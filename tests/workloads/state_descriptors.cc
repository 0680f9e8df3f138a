// What an open file is set to, by fcntl(2) and ioctl(2). Sockets' own options: sockets.cc.
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kDescriptorsSubject = "open files";

int end_of_pipe() {
  int ends[2] = {-1, -1};
  return pipe2(ends, O_CLOEXEC) == 0 ? ends[0] : -1;
}
int end_of_socket() {
  int ends[2] = {-1, -1};
  return socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0 ? ends[0] : -1;
}

int thread_number(Probe& probe) {
  int number = 0;
  probe.worker().run([&] { number = static_cast<int>(syscall(SYS_gettid)); });
  return number;
}

// Who is signalled of it, with which signal.
std::string owner_of(int fd) {
  f_owner_ex owner{};
  if (fcntl(fd, F_GETOWN_EX, &owner) != 0) return because("F_GETOWN_EX");
  return "kind " + std::to_string(owner.type) + " number " + std::to_string(owner.pid) +
         " signal " + std::to_string(fcntl(fd, F_GETSIG));
}
void add_owner(Probe& probe, const char* name, int fd, f_owner_ex owner) {
  probe.add(
      kDescriptorsSubject, name,
      [=] {
        if (fcntl(fd, F_SETOWN_EX, &owner) != 0) return Problem(because("F_SETOWN_EX"));
        return answer(fcntl(fd, F_SETSIG, SIGURG), "F_SETSIG");
      },
      [=] { return owner_of(fd); });
}

// How many wait that tell of this descriptor; they are taken.
int take_signals(int signal, int fd) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  siginfo_t info{};
  const timespec at_once{};
  int count = 0;
  while (sigtimedwait(&set, &info, &at_once) == signal)
    count += info.si_fd == fd ? 1 : 0;
  return count;
}

// A file that signals when it can be read: it still does.
void add_signalling(Probe& probe, const char* name, bool of_socket, int signal) {
  int ends[2] = {-1, -1};
  if (of_socket)
    (void)socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends);
  else
    (void)pipe2(ends, O_CLOEXEC);
  const auto read_end = ends[0];
  const auto write_end = ends[1];
  probe.add_check(
      kDescriptorsSubject, name,
      [=] {
        const f_owner_ex owner{F_OWNER_PID, getpid()};
        if (fcntl(read_end, F_SETOWN_EX, &owner) != 0 || fcntl(read_end, F_SETSIG, signal) != 0)
          return Problem(because("F_SETOWN_EX"));
        return answer(fcntl(read_end, F_SETFL, O_ASYNC), "F_SETFL");
      },
      [=]() -> Problem {
        char byte = 0;
        if ((fcntl(read_end, F_GETFL) & O_ASYNC) == 0) return "O_ASYNC is not set";
        if (write(write_end, &byte, 1) != 1 || read(read_end, &byte, 1) != 1)
          return because("a byte of its own");
        return take_signals(signal, read_end) > 0 ? std::nullopt : Problem("no signal comes");
      });
}

void add_pipes(Probe& probe) {
  int owned[2] = {-1, -1};
  if (pipe2(owned, O_CLOEXEC) == 0) {
    const auto read_end = owned[0];
    const auto write_end = owned[1];
    probe.add(
        kDescriptorsSubject, "mode and owner of a pipe (fchmod, fchown)",
        [=] {
          if (fchown(read_end, 12, 34) != 0) return Problem(because("fchown"));
          return answer(fchmod(write_end, 0640), "fchmod");
        },
        [=] {
          struct stat info {};
          if (fstat(read_end, &info) != 0) return because("fstat");
          return std::to_string(info.st_mode) + " of " + std::to_string(info.st_uid) + ":" +
                 std::to_string(info.st_gid);
        });
  }
  const int pipe = end_of_pipe();
  probe.add(
      kDescriptorsSubject, "size of a pipe (F_SETPIPE_SZ)",
      [=] { return answer(fcntl(pipe, F_SETPIPE_SZ, 262144), "F_SETPIPE_SZ"); },
      [=] { return std::to_string(fcntl(pipe, F_GETPIPE_SZ)); });
}

void add_files(Probe& probe) {
  if (!probe.with_locks()) return;
  const int leased = open(probe.file("lease").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  probe.add(
      kDescriptorsSubject, "lease of a file (F_SETLEASE)",
      [=] { return answer(fcntl(leased, F_SETLEASE, F_WRLCK), "F_SETLEASE"); },
      [=] { return std::to_string(fcntl(leased, F_GETLEASE)); });
}

// A file that is made in a folder that is watched is told to the program.
void add_dnotify(Probe& probe, int signal) {
  const std::string folder = probe.file("folder");
  (void)mkdir(folder.c_str(), 0700);
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  probe.add_check(
      kDescriptorsSubject, "watch of a folder (F_NOTIFY)",
      [=] {
        if (fcntl(fd, F_SETSIG, signal) != 0) return Problem(because("F_SETSIG"));
        return answer(fcntl(fd, F_NOTIFY, DN_CREATE | DN_MULTISHOT), "F_NOTIFY");
      },
      [=]() -> Problem {
        const std::string made = folder + "/made";
        close(open(made.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
        unlink(made.c_str());
        return take_signals(signal, fd) > 0 ? std::nullopt : Problem("no signal comes");
      });
}

void add_terminal(Probe& probe) {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) return;
  const int slave = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
  const auto add = [&](const char* name, int fd) {
    probe.add(
        kDescriptorsSubject, name, [=] { return answer(ioctl(fd, TIOCEXCL), "TIOCEXCL"); },
        [=] {
          int exclusive = -1;
          return ioctl(fd, TIOCGEXCL, &exclusive) != 0 ? because("TIOCGEXCL")
                                                       : std::to_string(exclusive);
        });
  };
  add("exclusive use of a terminal (TIOCEXCL)", slave);
  const int locked = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  probe.add(
      kDescriptorsSubject, "settings of a terminal that are locked (TIOCSLCKTRMIOS)",
      [=]() -> Problem {
        termios settings{};
        if (tcgetattr(locked, &settings) != 0) return because("tcgetattr");
        settings.c_lflag &= ~static_cast<tcflag_t>(ECHO);
        if (tcsetattr(locked, TCSANOW, &settings) != 0) return because("tcsetattr");
        termios locks{};
        locks.c_lflag = ECHO;
        return answer(ioctl(locked, TIOCSLCKTRMIOS, &locks), "TIOCSLCKTRMIOS");
      },
      [=] {
        termios settings{};
        termios locks{};
        if (tcgetattr(locked, &settings) != 0 || ioctl(locked, TIOCGLCKTRMIOS, &locks) != 0)
          return because("TIOCGLCKTRMIOS");
        return std::string((settings.c_lflag & ECHO) != 0 ? "echo" : "no echo") +
               ((locks.c_lflag & ECHO) != 0 ? ", locked" : ", not locked");
      });
}

struct Terminal {
  int master = -1;
  int slave = -1;
};

Terminal new_terminal() {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) return {};
  return {master, open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC)};
}

std::string output_of(int end) {
  pollfd state{end, POLLOUT, 0};
  return poll(&state, 1, 0) == 1 ? "goes on" : "stopped";
}
// What is typed is taken a moment later.
std::string output_after(const Terminal& terminal, char typed, const std::string& wanted) {
  if (write(terminal.master, &typed, 1) != 1) return because("write");
  std::string now = output_of(terminal.slave);
  for (int i = 0; i < 2000 && now != wanted; ++i) {
    usleep(1000);
    now = output_of(terminal.slave);
  }
  return now;
}

void add_stopped_output(Probe& probe) {
  constexpr char kStop = 023;
  constexpr char kStart = 021;
  const auto add = [&](const char* name, int end) {
    probe.add(
        kDescriptorsSubject, name, [=] { return answer(ioctl(end, TCXONC, TCOOFF), "TCXONC"); },
        [=] { return output_of(end); });
  };
  const Terminal stopped = new_terminal();
  add("output to a terminal that is stopped (TCOOFF)", stopped.slave);
  add("input of a terminal that is stopped (TCOOFF of its master)", new_terminal().master);
  const Terminal typed = new_terminal();
  probe.add_check(
      kDescriptorsSubject, "output to a terminal that is stopped by ^S, until ^Q",
      [=]() -> Problem {
        if (output_after(typed, kStop, "stopped") != "stopped") return "it goes on";
        return std::nullopt;
      },
      [=]() -> Problem {
        if (output_of(typed.slave) != "stopped") return "it goes on";
        if (output_after(typed, kStart, "goes on") != "goes on") return "^Q does not start it";
        if (output_after(typed, kStop, "stopped") != "stopped") return "^S does not stop it";
        return std::nullopt;
      });
}

// struct termios2 of asm-generic/termbits.h
struct SettingsWithSpeeds {
  std::uint32_t flags[4] = {};
  std::uint8_t characters[20] = {};
  std::uint32_t input_speed = 0;
  std::uint32_t output_speed = 0;
};

void add_speeds(Probe& probe) {
  constexpr unsigned long kGet = _IOR('T', 0x2A, SettingsWithSpeeds);
  constexpr unsigned long kSet = _IOW('T', 0x2B, SettingsWithSpeeds);
  constexpr std::uint32_t kAll = 0010017;  // CBAUD
  constexpr std::uint32_t kNameless = 0010000;
  const Terminal terminal = new_terminal();
  probe.add(
      kDescriptorsSubject, "speed of a terminal that has no name (BOTHER)",
      [=] {
        SettingsWithSpeeds settings;
        if (ioctl(terminal.slave, kGet, &settings) != 0) return Problem(because("TCGETS2"));
        settings.flags[2] = (settings.flags[2] & ~kAll) | kNameless;
        settings.input_speed = settings.output_speed = 12345;
        return answer(ioctl(terminal.slave, kSet, &settings), "TCSETS2");
      },
      [=] {
        SettingsWithSpeeds settings;
        if (ioctl(terminal.slave, kGet, &settings) != 0) return because("TCGETS2");
        return std::to_string(settings.input_speed) + " " + std::to_string(settings.output_speed);
      });
}

// linux/eventpoll.h, since Linux 6.9
struct PollParameters {
  std::uint32_t microseconds = 0;
  std::uint16_t budget = 0;
  std::uint8_t prefer = 0;
  std::uint8_t padding = 0;
};
constexpr unsigned long kSetParameters = _IOW(0x8A, 0x01, PollParameters);
constexpr unsigned long kGetParameters = _IOR(0x8A, 0x02, PollParameters);

void add_epoll(Probe& probe) {
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  probe.add(
      kDescriptorsSubject, "how an epoll polls network devices (EPIOCSPARAMS)",
      [=] {
        const PollParameters wanted{50, 16, 1, 0};
        return answer(ioctl(epoll, kSetParameters, &wanted), "EPIOCSPARAMS");
      },
      [=] {
        PollParameters now;
        if (ioctl(epoll, kGetParameters, &now) != 0) return because("EPIOCGPARAMS");
        return std::to_string(now.microseconds) + " us, budget " + std::to_string(now.budget) +
               ", prefer " + std::to_string(now.prefer);
      });
}

// Values that CRIU cuts to 32 bits; the last one is the highest that there is.
void add_eventfds(Probe& probe) {
  const auto add = [&](const char* name, int flags, std::uint64_t value) {
    const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | flags);
    probe.add(
        kDescriptorsSubject, name,
        [=] { return answer(eventfd_write(fd, value), "eventfd_write"); },
        [=] {
          const std::string path = "/proc/self/fdinfo/" + std::to_string(fd);
          const std::unique_ptr<FILE, int (*)(FILE*)> info(fopen(path.c_str(), "re"), fclose);
          char line[128];
          while (info && fgets(line, sizeof line, info.get()) != nullptr)
            if (std::string_view(line).starts_with("eventfd-count:")) return std::string(line);
          return because("eventfd-count");
        });
  };
  add("value of an eventfd above 32 bits", 0, 0x1'0000'0005);
  add("value of an eventfd with none of the lower 32 bits", 0, 0x7'0000'0000);
  add("value of an eventfd that is full", 0, ~std::uint64_t{1});
  add("value of an eventfd above 32 bits (EFD_SEMAPHORE)", EFD_SEMAPHORE, 0x1'0000'0005);
}

}  // namespace

void add_descriptors(Probe& probe) {
  const int first = signals_of_files();
  add_owner(probe, "process that a pipe signals (F_SETOWN_EX, F_SETSIG)", end_of_pipe(),
            {F_OWNER_PID, getpid()});
  if (probe.signals_threads()) {
    const int thread = thread_number(probe);
    add_owner(probe, "thread that a pipe signals", end_of_pipe(), {F_OWNER_TID, thread});
    add_owner(probe, "thread that a socket signals", end_of_socket(), {F_OWNER_TID, thread});
  }
  add_owner(probe, "group that a pipe signals", end_of_pipe(), {F_OWNER_PGRP, getpgrp()});
  add_owner(probe, "process that a socket signals", end_of_socket(), {F_OWNER_PID, getpid()});
  add_owner(probe, "group that a socket signals", end_of_socket(), {F_OWNER_PGRP, getpgrp()});
  add_signalling(probe, "signals of a pipe that can be read (O_ASYNC)", false, first);
  add_signalling(probe, "signals of a socket that can be read (O_ASYNC)", true, first + 1);
  add_pipes(probe);
  add_files(probe);
  add_dnotify(probe, first + 2);
  add_terminal(probe);
  add_stopped_output(probe);
  add_speeds(probe);
  add_epoll(probe);
  add_eventfds(probe);
}

}  // namespace stasis::workloads
