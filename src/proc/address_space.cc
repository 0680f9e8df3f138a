#include "proc/address_space.h"

#include <elf.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "base/call_within.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

// From here on it is quicker to look, and to change rights, which takes some 20 us: a piece of this
// size takes 30 by number, and 170 where 16 threads use the descriptor.
constexpr std::size_t kLarge = std::size_t{128} << 10;
// The kernel's own is some 400 bytes (AT_VECTOR_SIZE of linux/auxvec.h).
constexpr std::size_t kLargestAuxv = 4096;

off_t as_offset(std::uint64_t address) { return static_cast<off_t>(address); }

// Where the sixteen random bytes of the execve lie; 0 if the process does not say.
std::uint64_t random_address(const std::string& auxv) {
  for (std::size_t at = 0; at + sizeof(Elf64_auxv_t) <= auxv.size(); at += sizeof(Elf64_auxv_t)) {
    Elf64_auxv_t entry;
    std::memcpy(&entry, auxv.data() + at, sizeof entry);
    if (entry.a_type == AT_NULL) break;
    if (entry.a_type == AT_RANDOM) return entry.a_un.a_val;
  }
  return 0;
}

Error no_longer_there(Pid pid) {
  return Error{ErrorCode::kProcessGone,
               fmt::format("process {} has ended, or has become another program (exec)", pid.value),
               {}};
}

bool has_ended(Pid pid) {
  const auto info = ProcFs().process(pid);
  return !info || info->has_ended();
}

}  // namespace

Result<UniqueFd> AddressSpace::open_memory(Pid pid) {
  auto memory = open_file(AT_FDCWD, fmt::format("/proc/{}/mem", pid.value), O_RDWR);
  if (memory) return memory;
  Error error = std::move(memory.error());
  if (error.code == ErrorCode::kNotPermitted)
    error.remedy = "run as root, or with CAP_SYS_PTRACE, or as the user who owns the process";
  return fail(std::move(error));
}

Result<AddressSpace::Birth> AddressSpace::birth_of(Pid pid, const UniqueFd& memory) {
  const std::string path = fmt::format("/proc/{}/auxv", pid.value);
  STASIS_TRY_ASSIGN(auto file, open_file(AT_FDCWD, path, O_RDONLY));
  STASIS_TRY_ASSIGN(auto auxv, read_file(file, path, kLargestAuxv));
  Birth birth{std::move(auxv), {}};
  // A program may have made these bytes unreadable, or hidden where they are; then the rest tells:
  // of a program that was just started both are there.
  const std::uint64_t at = random_address(birth.auxv);
  // The program has chosen the address, and a page that is not there yet may be one that another
  // program serves (FUSE), which may never come.
  if (at != 0 && ServedPages(pid).is_there(at) &&
      ::pread(memory.get(), birth.random.data(), birth.random.size(), as_offset(at)) !=
          static_cast<ssize_t>(birth.random.size())) {
    birth.random = {};
  }
  return birth;
}

Result<AddressSpace> AddressSpace::open(Pid pid) {
  auto opened = call_within(pid, [pid] { return open_now(pid); });
  if (!opened) return fail(keeps_its_memory(pid));
  return std::move(*opened);
}

Result<AddressSpace> AddressSpace::open_now(Pid pid) {
  auto memory = open_memory(pid);
  if (!memory) {
    // One whose threads are ending has no memory any more, before its state says so. The kernel
    // says "not permitted" of one that has ended, too.
    const bool gone = memory.error().code == ErrorCode::kNoSuchProcess || has_ended(pid);
    return fail(gone ? no_longer_there(pid) : std::move(memory.error()));
  }
  // Nothing lies there; the answer waits for the lock of the process's mappings as any other does.
  char byte = 0;
  [[maybe_unused]] const ssize_t got = ::pread(memory->get(), &byte, sizeof byte, 0);
  auto birth = birth_of(pid, *memory);
  if (!birth) {
    const bool gone = birth.error().code == ErrorCode::kNoSuchProcess || has_ended(pid);
    return fail(gone ? no_longer_there(pid) : std::move(birth.error()));
  }
  // Where a kernel opens the memory of such a one, too, it says nothing: of a program that is
  // there, two words at least.
  if (birth->auxv.empty()) return fail(no_longer_there(pid));
  AddressSpace space(pid, std::move(*memory), std::move(*birth));
  // An execve between the two would have bound this to what is no more, and compare it with what
  // is.
  if (!is_of(pid, space.birth_)) return fail(no_longer_there(pid));
  return space;
}

bool AddressSpace::is_of(Pid pid, const Birth& birth) {
  const auto memory = open_memory(pid);
  if (!memory) return false;
  const auto now = birth_of(pid, *memory);
  return now && *now == birth;
}

Result<void> AddressSpace::check_current() const {
  const auto is_current =
      call_within(pid_, [pid = pid_, birth = birth_] { return is_of(pid, birth); });
  if (!is_current) return fail(keeps_its_memory(pid_));
  if (*is_current) return {};
  return fail(no_longer_there(pid_));
}

Result<bool> AddressSpace::check_not_served(Direction direction, std::uint64_t address,
                                            std::size_t size) const {
  const bool is_large = size >= kLarge;
  const auto waits = served_->waits_in(address, size, direction, is_large ? &memory_ : nullptr);
  if (waits == ServedPages::Waits::kStill) {
    return fail(
        ErrorCode::kBusy,
        fmt::format("cannot {} {} bytes of memory at {:#x} of process {}: it is of a file "
                    "whose file system does not give it",
                    direction == Direction::kRead ? "read" : "write", size, address, pid_.value),
        fmt::format("see what it is: `cat /proc/{}/maps`; a file system that a program "
                    "serves (FUSE), or of another machine (NFS); try again when it "
                    "answers, or end it",
                    pid_.value));
  }
  return is_large && waits == ServedPages::Waits::kNever;
}

Error AddressSpace::refusal(const char* what, std::uint64_t address, std::size_t size,
                            int number) const {
  // Nothing moved, and no error: no process runs in it.
  if (number == 0 || number == ESRCH) return no_longer_there(pid_);
  // The kernel says EIO of addresses where there is nothing.
  const int meant = number == EIO ? EFAULT : number;
  Error error = errno_error(fmt::format("cannot {} {} bytes of memory at {:#x} of process {}", what,
                                        size, address, pid_.value),
                            meant);
  if (meant == EFAULT) error.remedy = "the process has changed its own memory: try again";
  return error;
}

std::size_t AddressSpace::move_by_number(Direction direction, std::uint64_t address, void* data,
                                         std::size_t size) const {
  // Not with lesser rights, which do not suffice to open another user's process.
  if (!is_of(pid_, birth_)) return 0;
  const std::size_t done = rights_.move(direction, pid_, address, data, size);
  // What was read may be of the program that the process has become: then it is read again, from
  // what is no more.
  return direction == Direction::kRead && !is_of(pid_, birth_) ? 0 : done;
}

Result<void> AddressSpace::read(std::uint64_t address, void* data, std::size_t size) const {
  auto* to = static_cast<std::byte*>(data);
  STASIS_TRY_ASSIGN(const bool by_number, check_not_served(Direction::kRead, address, size));
  const std::size_t moved = by_number ? move_by_number(Direction::kRead, address, data, size) : 0;
  to += moved;
  address += moved;
  size -= moved;
  while (size > 0) {
    const ssize_t done = TEMP_FAILURE_RETRY(::pread(memory_.get(), to, size, as_offset(address)));
    if (done <= 0) return fail(refusal("read", address, size, done < 0 ? errno : 0));
    to += done;
    address += static_cast<std::uint64_t>(done);
    size -= static_cast<std::size_t>(done);
  }
  return {};
}

Result<void> AddressSpace::write(std::uint64_t address, const void* data, std::size_t size) const {
  const auto* from = static_cast<const std::byte*>(data);
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): it is only read
  void* source = const_cast<std::byte*>(from);
  STASIS_TRY_ASSIGN(const bool by_number, check_not_served(Direction::kWrite, address, size));
  const std::size_t moved =
      by_number ? move_by_number(Direction::kWrite, address, source, size) : 0;
  from += moved;
  address += moved;
  size -= moved;
  while (size > 0) {
    const ssize_t done =
        TEMP_FAILURE_RETRY(::pwrite(memory_.get(), from, size, as_offset(address)));
    if (done <= 0) return fail(refusal("write", address, size, done < 0 ? errno : 0));
    from += done;
    address += static_cast<std::uint64_t>(done);
    size -= static_cast<std::size_t>(done);
  }
  return {};
}

std::size_t AddressSpace::write_protected(std::uint64_t address,
                                          std::span<const std::uint64_t> words) const {
  const ssize_t done = TEMP_FAILURE_RETRY(
      ::pwrite(memory_.get(), words.data(), words.size_bytes(), as_offset(address)));
  return done < 0 ? 0 : static_cast<std::size_t>(done);
}

bool share_address_space(Pid one, Pid other) {
  return ::syscall(SYS_kcmp, one.value, other.value, KCMP_VM, 0, 0) == 0;
}

}  // namespace stasis::proc
