#include "proc/seccomp_filters.h"

#include <linux/audit.h>
#include <sys/ptrace.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "proc/ptrace_status.h"

namespace stasis::proc {
namespace {

constexpr int kGetFilter = 0x420c;  // PTRACE_SECCOMP_GET_FILTER of linux/ptrace.h
constexpr std::size_t kMostFilters = 64;

// Of an arithmetic or a jump instruction: the constant, or the index register.
struct Machine {
  std::uint32_t accumulator = 0;
  std::uint32_t index = 0;
  std::array<std::uint32_t, BPF_MEMWORDS> memory{};

  bool arithmetic(const sock_filter& one) {
    const std::uint32_t by = BPF_SRC(one.code) == BPF_X ? index : one.k;
    switch (BPF_OP(one.code)) {
      case BPF_ADD:
        accumulator += by;
        return true;
      case BPF_SUB:
        accumulator -= by;
        return true;
      case BPF_MUL:
        accumulator *= by;
        return true;
      case BPF_DIV:
        if (by == 0) return false;
        accumulator /= by;
        return true;
      case BPF_AND:
        accumulator &= by;
        return true;
      case BPF_OR:
        accumulator |= by;
        return true;
      case BPF_XOR:
        accumulator ^= by;
        return true;
      case BPF_LSH:
        accumulator = by < 32 ? accumulator << by : 0;
        return true;
      case BPF_RSH:
        accumulator = by < 32 ? accumulator >> by : 0;
        return true;
      case BPF_NEG:
        accumulator = 0 - accumulator;
        return true;
      default:
        return false;
    }
  }

  // How far to go on.
  std::optional<std::uint32_t> jump(const sock_filter& one) const {
    const std::uint32_t by = BPF_SRC(one.code) == BPF_X ? index : one.k;
    switch (BPF_OP(one.code)) {
      case BPF_JA:
        return one.k;
      case BPF_JEQ:
        return accumulator == by ? one.jt : one.jf;
      case BPF_JGT:
        return accumulator > by ? one.jt : one.jf;
      case BPF_JGE:
        return accumulator >= by ? one.jt : one.jf;
      case BPF_JSET:
        return (accumulator & by) != 0 ? one.jt : one.jf;
      default:
        return std::nullopt;
    }
  }

  bool load(const sock_filter& one, const seccomp_data& call, std::uint32_t& into) const {
    switch (BPF_MODE(one.code)) {
      case BPF_IMM:
        into = one.k;
        return true;
      case BPF_LEN:
        into = sizeof call;
        return true;
      case BPF_MEM:
        if (one.k >= memory.size()) return false;
        into = memory.at(one.k);
        return true;
      case BPF_ABS: {
        const bool of_pointer = one.k + 4 > offsetof(seccomp_data, instruction_pointer) &&
                                one.k < offsetof(seccomp_data, args);
        if (one.k % 4 != 0 || one.k + 4 > sizeof call || of_pointer) return false;
        std::memcpy(&into, reinterpret_cast<const char*>(&call) + one.k, sizeof into);
        return true;
      }
      default:
        return false;
    }
  }
};

}  // namespace

std::optional<std::vector<SystemCallFilter>> filters_of(Tid stopped) {
  const auto get = [&](std::size_t index, sock_filter* into) {
    return ::ptrace(static_cast<__ptrace_request>(kGetFilter), stopped.value, as_pointer(index),
                    into);
  };
  std::vector<SystemCallFilter> out;
  for (std::size_t index = 0; index < kMostFilters; ++index) {
    const long length = get(index, nullptr);
    if (length < 0 && errno == ENOENT) return out;
    if (length <= 0 || length > BPF_MAXINSNS) return std::nullopt;
    SystemCallFilter& program = out.emplace_back(static_cast<std::size_t>(length));
    if (get(index, program.data()) != length) return std::nullopt;
  }
  return std::nullopt;
}

seccomp_data call_of(int number, std::span<const std::uint64_t> arguments) {
  seccomp_data out{};
  out.nr = number;
  out.arch = AUDIT_ARCH_X86_64;
  std::copy_n(arguments.begin(), std::min(arguments.size(), std::size(out.args)), out.args);
  return out;
}

std::optional<std::uint32_t> run_filter(std::span<const sock_filter> program,
                                        const seccomp_data& call) {
  Machine machine;
  // It jumps forward only, so it ends.
  for (std::size_t at = 0; at < program.size(); ++at) {
    const sock_filter& one = program[at];
    switch (BPF_CLASS(one.code)) {
      case BPF_LD:
        if (!machine.load(one, call, machine.accumulator)) return std::nullopt;
        break;
      case BPF_LDX:
        if (!machine.load(one, call, machine.index)) return std::nullopt;
        break;
      case BPF_ST:
      case BPF_STX:
        if (one.k >= machine.memory.size()) return std::nullopt;
        machine.memory.at(one.k) =
            BPF_CLASS(one.code) == BPF_ST ? machine.accumulator : machine.index;
        break;
      case BPF_ALU:
        if (!machine.arithmetic(one)) return std::nullopt;
        break;
      case BPF_JMP: {
        const auto distance = machine.jump(one);
        if (!distance || *distance >= program.size()) return std::nullopt;
        at += *distance;
        break;
      }
      case BPF_RET:
        return BPF_RVAL(one.code) == BPF_A ? machine.accumulator : one.k;
      default:  // BPF_MISC
        if (BPF_MISCOP(one.code) == BPF_TAX)
          machine.index = machine.accumulator;
        else
          machine.accumulator = machine.index;
        break;
    }
  }
  return std::nullopt;
}

bool let_pass(std::span<const SystemCallFilter> filters, const seccomp_data& call) {
  return std::all_of(filters.begin(), filters.end(), [&](const SystemCallFilter& filter) {
    const auto answer = run_filter(filter, call);
    const std::uint32_t action =
        answer ? *answer & SECCOMP_RET_ACTION_FULL : SECCOMP_RET_KILL_PROCESS;
    return action == SECCOMP_RET_ALLOW || action == SECCOMP_RET_LOG;
  });
}

}  // namespace stasis::proc
