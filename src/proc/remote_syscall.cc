#include "proc/remote_syscall.h"

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <initializer_list>

#include <fmt/format.h>

namespace stasis {
namespace {

using proc::StoppedThreads;

// The layout of the place.
constexpr std::array<std::uint64_t, 2> kMagic{0x5354415349530003, 0x86e0f41b3d5a7c29};
constexpr std::uint64_t kSize = 768;
constexpr std::uint64_t kThreadOffset = 16;
constexpr std::uint64_t kSavedOffset = 32;
constexpr std::uint64_t kFlagsOffset = 280;  // of the processor, as POPF takes them
constexpr std::uint64_t kDataOffset = 288;
constexpr std::uint64_t kStepCodeOffset = 496;
constexpr std::uint64_t kWayBackOffset = kStepCodeOffset + 2;
static_assert(sizeof(SavedThread) % 8 == 0 && kSavedOffset + sizeof(SavedThread) <= kFlagsOffset &&
              kDataOffset + kRemoteCallData * 8 <= kStepCodeOffset);

constexpr std::uint64_t kNeverBlocked = 1ULL << (SIGKILL - 1) | 1ULL << (SIGSTOP - 1);

using Step = std::array<std::uint64_t, kSize / 8>;

// Instructions that find their operands in the place itself, from wherever it lies.
class Code {
 public:
  void plain(std::initializer_list<std::uint8_t> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  // One that ends with the distance to its operand.
  void with_operand(std::initializer_list<std::uint8_t> bytes, std::uint64_t operand) {
    plain(bytes);
    const auto end = kStepCodeOffset + bytes_.size() + sizeof(std::uint32_t);
    const auto distance = static_cast<std::uint32_t>(operand - end);
    for (int shift = 0; shift < 32; shift += 8)
      bytes_.push_back(static_cast<std::uint8_t>(distance >> shift));
  }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
};

#define SAVED(member) \
  (kSavedOffset + offsetof(SavedThread, registers) + offsetof(StoppedThreads::Registers, member))

// The system call, and what a thread does after it when no tool takes it from there: it takes back
// all that the call has changed and goes on where it was. Flags before anything else: nothing may
// be written below the stack pointer meanwhile, and no signal comes yet.
std::vector<std::uint8_t> step_code() {
  Code code;
  code.plain({0x0f, 0x05});                             // syscall
  code.with_operand({0x48, 0x8d, 0x25}, kFlagsOffset);  // lea rsp
  code.plain({0x9d});                                   // popfq
  code.with_operand({0x48, 0x8b, 0x25}, SAVED(rsp));    // mov rsp
  code.plain({0xb8, 14, 0, 0, 0});                      // mov eax
  code.plain({0xbf, 2, 0, 0, 0});                       // mov edi
  code.with_operand({0x48, 0x8d, 0x35}, kSavedOffset + offsetof(SavedThread, signal_mask));  // rsi
  code.plain({0xba, 0, 0, 0, 0});        // mov edx
  code.plain({0x41, 0xba, 8, 0, 0, 0});  // mov r10d
  code.plain({0x0f, 0x05});              // rt_sigprocmask(SIG_SETMASK, mask, nullptr, 8)
  code.with_operand({0x48, 0x8b, 0x05}, SAVED(rax));
  code.with_operand({0x48, 0x8b, 0x0d}, SAVED(rcx));
  code.with_operand({0x48, 0x8b, 0x15}, SAVED(rdx));
  code.with_operand({0x48, 0x8b, 0x1d}, SAVED(rbx));
  code.with_operand({0x48, 0x8b, 0x2d}, SAVED(rbp));
  code.with_operand({0x48, 0x8b, 0x35}, SAVED(rsi));
  code.with_operand({0x48, 0x8b, 0x3d}, SAVED(rdi));
  code.with_operand({0x4c, 0x8b, 0x05}, SAVED(r8));
  code.with_operand({0x4c, 0x8b, 0x0d}, SAVED(r9));
  code.with_operand({0x4c, 0x8b, 0x15}, SAVED(r10));
  code.with_operand({0x4c, 0x8b, 0x1d}, SAVED(r11));
  code.with_operand({0x4c, 0x8b, 0x25}, SAVED(r12));
  code.with_operand({0x4c, 0x8b, 0x2d}, SAVED(r13));
  code.with_operand({0x4c, 0x8b, 0x35}, SAVED(r14));
  code.with_operand({0x4c, 0x8b, 0x3d}, SAVED(r15));
  code.with_operand({0xff, 0x25}, SAVED(rip));  // jmp
  return code.bytes();
}
#undef SAVED

}  // namespace

std::vector<std::uint64_t> SavedThread::words() const {
  std::vector<std::uint64_t> out(sizeof(SavedThread) / 8);
  std::memcpy(out.data(), this, sizeof *this);
  return out;
}

Result<SavedThread> read_saved(const proc::AddressSpace& space, std::uint64_t address) {
  SavedThread saved;
  STASIS_TRY(space.read(address, &saved, sizeof saved));
  if (saved.mark != SavedThread::kMark) {
    return fail(
        ErrorCode::kInternal,
        fmt::format("process {}: what a held thread goes on with is damaged", space.pid().value),
        "end the process, and restore it from an image if there is one");
  }
  return saved;
}

Result<SavedThread> save(const StoppedThreads& stopped, Tid thread, bool anywhere) {
  STASIS_TRY_ASSIGN(auto registers, anywhere ? stopped.registers_to_go_on(thread)
                                             : stopped.registers_to_stop_with(thread));
  STASIS_TRY_ASSIGN(auto mask, stopped.signal_mask(thread));
  return SavedThread{SavedThread::kMark, mask, registers};
}

Result<void> send_on(const StoppedThreads& stopped, Tid thread, const SavedThread& saved) {
  STASIS_TRY(stopped.set_signal_mask(thread, saved.signal_mask));
  return stopped.set_registers(thread, saved.registers);
}

void RemoteCallRoom::probe(const proc::AddressSpace& space, const proc::Mapping& mapping) {
  if (mapping.permissions != "r-xp" || mapping.inode == 0) return;
  Step tail{};
  const std::uint64_t at = mapping.end - kSize;
  if (!space.read(at, tail.data(), kSize)) return;
  if (tail[0] == kMagic[0] && tail[1] == kMagic[1]) {
    begun = {at, Tid{static_cast<int>(tail[kThreadOffset / 8])}};
  } else if (!room && std::all_of(tail.begin(), tail.end(), [](auto w) { return w == 0; })) {
    room = at;
  }
}

Result<void> make_system_calls(const proc::AddressSpace& space, const StoppedThreads& stopped,
                               const RemoteCallRoom& places,
                               const std::function<Result<void>(const SystemCall&)>& act,
                               std::span<const std::uint64_t> data) {
  return make_system_calls(space, stopped, stopped.threads().front(), places, act, data);
}

Result<void> make_system_calls(const proc::AddressSpace& space, const StoppedThreads& stopped,
                               Tid thread, const RemoteCallRoom& places,
                               const std::function<Result<void>(const SystemCall&)>& act,
                               std::span<const std::uint64_t> data) {
  const Pid pid = space.pid();
  if (!places.room) {
    return fail(refusal(
        {"parking", Severity::kRed, pid,
         fmt::format("there is no room for a system call in the code of process {}", pid.value),
         fmt::format("report this, with what `cat /proc/{}/maps` says", pid.value)}));
  }
  const std::uint64_t room = *places.room;
  STASIS_TRY_ASSIGN(auto before, save(stopped, thread, true));

  Step step{};
  const auto saved = before.words();
  std::copy(saved.begin(), saved.end(), step.begin() + kSavedOffset / 8);
  step[kThreadOffset / 8] = static_cast<std::uint64_t>(thread.value);
  constexpr std::uint64_t kSingleStep = 0x100;
  step[kFlagsOffset / 8] = before.registers.eflags & ~kSingleStep;
  const auto code = step_code();
  std::memcpy(&step[kStepCodeOffset / 8], code.data(),
              std::min(code.size(), kSize - kStepCodeOffset));
  std::copy_n(data.begin(), std::min(data.size(), kRemoteCallData), step.begin() + kDataOffset / 8);
  STASIS_TRY(stopped.write(thread, room, step));
  // The mark comes last: a marked record is whole.
  STASIS_TRY(stopped.write(thread, room, kMagic));
  // Wherever the tool is killed from here on, the thread finds its way back.
  auto away = before.registers;
  away.rip = way_back(places);
  auto done = stopped.set_registers(thread, away);
  if (done) done = stopped.set_signal_mask(thread, proc::kAllSignals);
  if (done) {
    done = act([&](std::uint64_t number, std::span<const std::uint64_t> arguments) {
      return stopped.system_call(thread, room + kStepCodeOffset, number, arguments);
    });
  }
  auto back = send_on(stopped, thread, before);
  if (back) {
    step.fill(0);
    back = stopped.write(thread, room, step);
  }
  return done ? back : done;
}

std::uint64_t remote_call_data(const RemoteCallRoom& places) { return *places.room + kDataOffset; }

std::uint64_t way_back(const RemoteCallRoom& places) { return *places.room + kWayBackOffset; }

Result<void> finish_remote_call(const proc::AddressSpace& space, const StoppedThreads& stopped,
                                const RemoteCallRoom::Begun& begun) {
  STASIS_TRY_ASSIGN(auto saved, read_saved(space, begun.address + kSavedOffset));
  for (const Tid thread : stopped.threads()) {
    auto registers = stopped.registers(thread);
    auto mask = stopped.signal_mask(thread);
    if (!registers || !mask) continue;  // killed
    Result<void> done;
    // By where it is: its number may be another one in our PID namespace.
    if (registers->rip - (begun.address + kStepCodeOffset) < kSize - kStepCodeOffset) {
      done = send_on(stopped, thread, saved);
    } else if (thread == begun.thread && (*mask | kNeverBlocked) == proc::kAllSignals) {
      done = stopped.set_signal_mask(thread, saved.signal_mask);
    }
    STASIS_TRY(std::move(done));
  }
  if (stopped.threads().empty()) return {};
  const Step zeros{};
  return stopped.write(stopped.threads().front(), begun.address, zeros);
}

}  // namespace stasis
