// How memory is given to the process.
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <vector>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kMemorySubject = "memory";
constexpr std::size_t kSize = 4u << 20;
// linux/prctl.h; newer than Debian 12's
constexpr int kSetMemoryMerge = 67;
constexpr int kFutexHash = 78;
constexpr unsigned long kSetFutexSlots = 1;
constexpr unsigned long kGetFutexSlots = 2;
constexpr int kGetMemoryMerge = 68;
constexpr int kSetMapping = 0x53564d41;      // PR_SET_VMA, with 0: PR_SET_VMA_ANON_NAME
constexpr unsigned long kExceptAdvised = 2;  // PR_THP_DISABLE_EXCEPT_ADVISED, Linux 6.18

std::string policy_at(void* address) {
  int mode = -1;
  unsigned long nodes[16] = {};
  if (syscall(SYS_get_mempolicy, &mode, nodes, 1024UL, address, address ? MPOL_F_ADDR : 0) != 0)
    return because("get_mempolicy");
  return "mode " + std::to_string(mode) + " nodes " + std::to_string(nodes[0]);
}
std::string policy() { return policy_at(nullptr); }
Problem set_policy(int mode) {
  const unsigned long nodes = 1;
  return answer(syscall(SYS_set_mempolicy, mode, &nodes, 8UL), "set_mempolicy");
}

void* new_mapping() {
  void* made = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return made == MAP_FAILED ? nullptr : made;
}

void* g_of_both = nullptr;  // NOLINT: set before there are threads

// A word of VmFlags (proc_pid_smaps(5)) of the mapping at `address`.
std::string flags_at(void* address) {
  std::ifstream file("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool here = false;
  for (std::string line; std::getline(file, line);) {
    char* next = nullptr;
    const unsigned long start = std::strtoul(line.c_str(), &next, 16);
    // "55d0c0a4e000-55d0c0a50000 r--p ..."; other lines begin with a word.
    if (next != line.c_str() && *next == '-')
      here = start <= wanted && wanted < std::strtoul(next + 1, nullptr, 16);
    if (here && line.starts_with("VmFlags:")) return line.substr(9);
  }
  return "no such mapping";
}

// Of /proc/self/maps.
std::string line_of(void* address) {
  std::ifstream file("/proc/self/maps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  for (std::string line; std::getline(file, line);) {
    char* next = nullptr;
    const unsigned long start = std::strtoul(line.c_str(), &next, 16);
    if (start <= wanted && wanted < std::strtoul(next + 1, nullptr, 16)) return line;
  }
  return "no such mapping";
}

void add_advice(Probe& probe, const char* name, int advice) {
  void* mapping = new_mapping();
  probe.add(
      kMemorySubject, name, [=] { return answer(madvise(mapping, kSize, advice), "madvise"); },
      [=] { return flags_at(mapping); });
}

// Of a new mapping: one that is locked is there at once.
std::string locking() {
  void* made = new_mapping();
  std::vector<unsigned char> there(kSize / 4096);
  if (made == nullptr || mincore(made, kSize, there.data()) != 0) return because("mincore");
  const bool locked = flags_at(made).find(" lo") != std::string::npos;
  munmap(made, kSize);
  return std::string(locked ? "locked" : "not locked") + ((there[0] & 1) != 0 ? ", there" : "");
}

}  // namespace

void make_memory_of_both() { g_of_both = new_mapping(); }

void add_memory(Probe& probe) {
  probe.add(
      kMemorySubject, "NUMA policy of the first thread", [] { return set_policy(MPOL_BIND); },
      policy);
  probe.add_for_thread(
      kMemorySubject, "NUMA policy of another thread", [] { return set_policy(MPOL_INTERLEAVE); },
      policy);
  void* bound = new_mapping();
  probe.add(
      kMemorySubject, "NUMA policy of a mapping (mbind)",
      [=] {
        const unsigned long nodes = 1;
        return answer(syscall(SYS_mbind, bound, kSize, MPOL_PREFERRED, &nodes, 8UL, 0), "mbind");
      },
      [=] { return policy_at(bound); });
  probe.add(
      kMemorySubject,
      "transparent huge pages disabled (PR_SET_THP_DISABLE), where Linux can but for advised "
      "memory",
      [] {
        if (prctl(PR_SET_THP_DISABLE, 1UL, kExceptAdvised, 0UL, 0UL) == 0) return Problem();
        return answer(prctl(PR_SET_THP_DISABLE, 1UL, 0UL, 0UL, 0UL), "prctl");
      },
      [] { return std::to_string(prctl(PR_GET_THP_DISABLE, 0UL, 0UL, 0UL, 0UL)); });
  probe.add(
      kMemorySubject, "pages of equal content merged (PR_SET_MEMORY_MERGE)",
      [] { return answer(prctl(kSetMemoryMerge, 1UL, 0UL, 0UL, 0UL), "prctl"); },
      [] { return std::to_string(prctl(kGetMemoryMerge, 0UL, 0UL, 0UL, 0UL)); });
  probe.add(
      kMemorySubject, "size of the futex table (PR_FUTEX_HASH)",
      [] {
        // More than any machine's processors would have the kernel choose.
        return answer(prctl(kFutexHash, kSetFutexSlots, 32768UL, 0UL, 0UL), "PR_FUTEX_HASH");
      },
      [] { return std::to_string(prctl(kFutexHash, kGetFutexSlots, 0UL, 0UL, 0UL)); });
  probe.add(
      kMemorySubject, "new memory is locked (mlockall, MCL_FUTURE)",
      [] { return answer(mlockall(MCL_FUTURE), "mlockall"); }, [] { return locking(); });
  void* named = new_mapping();
  probe.add(
      kMemorySubject, "name of anonymous memory (PR_SET_VMA)",
      [=] { return answer(prctl(kSetMapping, 0UL, named, kSize, "state-probe"), "PR_SET_VMA"); },
      [=] { return line_of(named); });
  probe.add(
      kMemorySubject, "memory that is locked, at an address at which the parent has memory, too",
      [] { return answer(mlock(g_of_both, kSize), "mlock"); }, [] { return flags_at(g_of_both); });
  void* locked = new_mapping();
  probe.add(
      kMemorySubject, "memory that is locked (mlock)",
      [=] { return answer(mlock(locked, kSize), "mlock"); }, [=] { return flags_at(locked); });
  add_advice(probe, "MADV_DONTFORK", MADV_DONTFORK);
  add_advice(probe, "MADV_DONTDUMP", MADV_DONTDUMP);
  add_advice(probe, "MADV_WIPEONFORK", MADV_WIPEONFORK);
  add_advice(probe, "MADV_HUGEPAGE", MADV_HUGEPAGE);
  add_advice(probe, "MADV_NOHUGEPAGE", MADV_NOHUGEPAGE);
  add_advice(probe, "MADV_SEQUENTIAL", MADV_SEQUENTIAL);
  add_advice(probe, "MADV_RANDOM", MADV_RANDOM);
}

}  // namespace stasis::workloads
