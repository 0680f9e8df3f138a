// Memory that a program has sealed against any change of its mapping (mseal), given a protection
// key (pkey_mprotect), provides the pages of (userfaultfd), or lets the kernel drop
// (MAP_DROPPABLE), which CRIU 4.2.1 restores without.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/fd.h"
#include "base/units.h"
#include "doctor/criu_checks.h"
#include "proc/process_file.h"

namespace stasis::doctor {
namespace {

constexpr Kind kSealed{"sealed-memory", Severity::kRed,
                       "has sealed memory (mseal), which a restore would leave without its seal",
                       "do without mseal() in the program"};

constexpr Kind kKeyed{
    "protection-keys", Severity::kRed,
    "has memory with protection keys (pkey_mprotect), which a restore would leave "
    "without them",
    "do without pkey_mprotect() in the program"};

// One with the descriptor in the tree is refused for that.
constexpr Kind kProvided{"provided-memory", Severity::kRed,
                         "has memory whose pages a program outside of the tree provides "
                         "(userfaultfd), which a restore would leave to the kernel",
                         "dump it when all pages are there and that memory is the kernel's again "
                         "(UFFDIO_UNREGISTER, or the end of that program)"};

constexpr Kind kSealedFile{
    "sealed-file", Severity::kRed,
    "has memory (memfd_create) that is sealed against writing and mapped by "
    "a descriptor that could write, which CRIU seals before it maps it, and so cannot restore",
    "let the program map it by a descriptor opened read-only, or private"};

constexpr Kind kDroppable{"droppable-memory", Severity::kYellow,
                          "has memory that the kernel may drop (MAP_DROPPABLE): it comes back as "
                          "zeros",
                          "nothing, if the program expects zeros there at any time, as it has to"};
// The C library (glibc 2.41 and newer) has 256 bytes of it for each thread that wants random
// numbers, and expects zeros there.
constexpr std::uint64_t kDroppableOfLibrary = 1U << 20;

constexpr long kMseal = 462;  // SYS_mseal, newer than Debian 12's headers

// "Size:      4 kB"
std::uint64_t kibibytes_of(std::string_view line) {
  const std::size_t digit = std::min(line.find_first_of("0123456789"), line.size());
  std::uint64_t number = 0;
  (void)std::from_chars(line.data() + digit, line.data() + line.size(), number);
  return number;
}

bool kernel_has_keys() {
  const int key = ::pkey_alloc(0, 0);
  if (key < 0) return false;
  (void)::pkey_free(key);
  return true;
}

// Sealing nothing succeeds. Without it (before Linux 6.10) no page table need be walked: the kernel
// looks at each page before it tells a mapping's flags (8 ms for a GiB of small ones).
bool kernel_seals() { return ::syscall(kMseal, 0, 0, 0) == 0; }

// Is what is mapped there sealed against writing, and its file open for that? The link has the
// file's mode, and not the mapping's: since Linux 6.7 a seal takes the right to write (" mw" of
// smaps) from a mapping that is made after it, as a file open for reading alone does.
bool is_sealed_file(Pid pid, const proc::Mapping& mapping) {
  // The link is in the process's memory, which it may keep.
  const auto may_write = call_within(pid, [link = proc::link_of_mapping(pid, mapping)] {
    struct stat info {};
    return ::lstat(link.c_str(), &info) == 0 && (info.st_mode & S_IWUSR) != 0;
  });
  if (!may_write.value_or(false)) return false;
  const proc::MappedFile mapped(pid, mapping);
  const auto file = open_checked(AT_FDCWD, mapped.link(), O_RDONLY, &is_memory_file);
  const int seals = file ? ::fcntl(file->get(), F_GET_SEALS) : 0;
  return seals > 0 && (seals & F_SEAL_WRITE) != 0;
}

// Needs no walk of page tables, so that it is looked for on each kernel.
void probe_sealed_files(Pid pid, const std::vector<proc::Mapping>& mappings, Signs& out) {
  for (const proc::Mapping& mapping : mappings) {
    const std::string& how = mapping.permissions;
    if (!mapping.path.starts_with("/memfd:") || !how.ends_with('s') ||
        how.find('w') != std::string::npos)
      continue;
    if (!is_sealed_file(pid, mapping)) continue;
    out.add(pid, kSealedFile, mapping.path);
    return;
  }
}

}  // namespace

GuardedMemory guarded_memory(std::istream& smaps) {
  GuardedMemory out;
  std::string mapping;
  std::uint64_t size = 0;
  for (std::string line; std::getline(smaps, line);) {
    // Those of a mapping begin with a capital letter, and its own with a number in hexadecimal.
    if (!line.empty() && (line.front() < 'A' || line.front() > 'Z')) {
      mapping = line.substr(0, line.find(' '));
    }
    if (line.starts_with("Size:")) size = kibibytes_of(line) << 10;
    if (line.starts_with("VmFlags:")) {
      const auto has = [&](const char* flag) { return line.find(flag) != std::string::npos; };
      if (out.sealed.empty() && has(" sl")) out.sealed = mapping;
      if (out.provided.empty() && (has(" um") || has(" uw") || has(" ui"))) out.provided = mapping;
      if (has(" dp")) out.droppable += size;
    }
    constexpr std::string_view kKey = "ProtectionKey:";
    if (out.keyed.empty() && line.starts_with(kKey) &&
        line.find_first_of("123456789", kKey.size()) != std::string::npos)
      out.keyed = mapping;
  }
  return out;
}

void probe_seals(Facts& facts, const Processes& processes, Signs& out) {
  static const bool guarding = kernel_seals() || kernel_has_keys();
  for (const proc::ProcessInfo& info : processes) {
    if (const auto mappings = facts.mappings(info.pid))
      probe_sealed_files(info.pid, *mappings, out);
    if (!guarding) continue;
    proc::ProcessText file(info.pid, "smaps");
    const GuardedMemory guarded = guarded_memory(file);
    if (!guarded.sealed.empty()) out.add(info.pid, kSealed, guarded.sealed);
    if (!guarded.keyed.empty()) out.add(info.pid, kKeyed, guarded.keyed);
    if (!guarded.provided.empty()) out.add(info.pid, kProvided, guarded.provided);
    if (guarded.droppable >= kDroppableOfLibrary)
      out.add(info.pid, kDroppable, format_bytes(guarded.droppable));
  }
}

}  // namespace stasis::doctor
