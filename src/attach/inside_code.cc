// The code that runs inside a target. It is never run here: the tool copies it there.
//
// All of it lies in one section, needs no relocation and no library, and touches no vector
// register: it must be right at whatever address it is put (cmake/CheckInsideCode.cmake looks at
// the compiled file). It is compiled with options of its own (CMakeLists.txt).
//
// The first thread is none of the C library's: the kernel has made it, with a descriptor that the
// tool has written. It has the library make a second one, which does the work, and ends.
#include "attach/inside_block.h"

// NOLINTBEGIN: there is no library here
#define INSIDE __attribute__((section("stasis_inside"), used, visibility("hidden")))

// The instruction at which a thread of the target calls clone(2), with the block in r9. The thread
// of the program finds its tool killed if it ever comes past it, and goes its way. The new one has
// the state of the processor that the other one happened to have.
asm(R"(
  .pushsection stasis_inside, "ax", @progbits
  .hidden stasis_inside_clone
  .global stasis_inside_clone
  stasis_inside_clone:
    syscall
    testl %eax, %eax
    jz 1f
    jmp *32(%r9)
  1:
    cld
    fninit
    pushq $0x1f80
    ldmxcsr (%rsp)
    xorl %ebp, %ebp
    movq %r9, %rdi
    andq $-16, %rsp
    call stasis_inside_first
    ud2
  .popsection
)");

namespace stasis::attach {
namespace {

constexpr long kSysMask = 14;
constexpr long kSysExit = 60;
constexpr long kSysClose = 3;
constexpr long kSysTid = 186;
constexpr long kSysPrctl = 157;
constexpr long kSysRseq = 334;
constexpr long kSetName = 15;
constexpr std::uint64_t kSlab = std::uint64_t{2} << 20;
constexpr std::uint64_t kUnit = 512;
constexpr std::uint64_t kHostPage = 4096;
constexpr std::uint64_t kMostDense = std::uint64_t{4} << 20;  // some 0.5 s

INSIDE inline long call(long number, std::uint64_t a, std::uint64_t b, std::uint64_t c,
                        std::uint64_t d) {
  long result = number;
  register std::uint64_t r10 asm("r10") = d;
  asm volatile("syscall"
               : "+a"(result)
               : "D"(a), "S"(b), "d"(c), "r"(r10)
               : "rcx", "r11", "memory");
  return result;
}

INSIDE inline std::uint64_t address_of(const void* at) {
  return reinterpret_cast<std::uint64_t>(at);
}

INSIDE inline void set(std::uint32_t& state, InsideState value) {
  __atomic_store_n(&state, static_cast<std::uint32_t>(value), __ATOMIC_RELEASE);
}

INSIDE inline bool is_cancelled(const InsideBlock* block) {
  return __atomic_load_n(&block->cancel, __ATOMIC_RELAXED) != 0;
}

// A pool that this process has made gives a handle of its memory, and one that it has imported does
// not (580, H200). The handle is a descriptor, closed at once.
INSIDE std::uint32_t ask_for_handle(InsideBlock* block, std::uint64_t start, std::uint64_t size) {
  using Function = unsigned (*)(void* handle, std::uint64_t start, std::uint64_t size, int type,
                                unsigned long long flags);
  constexpr int kDmaBuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
  if (block->get_handle == 0) return kNoFunction;
  const std::uint64_t from = (start + kHostPage - 1) / kHostPage * kHostPage;
  const std::uint64_t to = (start + size) / kHostPage * kHostPage;
  if (to <= from) return kNotAsked;
  int descriptor = -1;
  const auto get = reinterpret_cast<Function>(block->get_handle);
  const unsigned result = get(&descriptor, from, to - from, kDmaBuf, 0);
  if (result == 0 && descriptor >= 0)
    (void)call(kSysClose, static_cast<std::uint64_t>(descriptor), 0, 0, 0);
  return result;
}

// Whether the last answer was of the same memory, or of memory of the same kind in one reservation.
INSIDE bool is_as_before(const InsideBlock* block, const volatile std::uint64_t* values) {
  if (block->answer_count == 0) return false;
  const auto* last =
      reinterpret_cast<const SurveyAnswer*>(block->answers) + block->answer_count - 1;
  for (unsigned i = 0; i < kSurveyAttributes; ++i)
    if (values[i] != last->values[i]) return false;
  return true;
}

// Where to ask next: behind what was found, and from there by steps.
INSIDE std::uint64_t ask(InsideBlock* block, std::uint64_t at, bool& found) {
  using Function =
      unsigned (*)(unsigned count, unsigned* attributes, void** data, std::uint64_t pointer);
  volatile unsigned numbers[kSurveyAttributes];
  numbers[kSurveyContext] = 1;
  numbers[kSurveyType] = 2;
  numbers[kSurveyStart] = 11;
  numbers[kSurveySize] = 12;
  numbers[kSurveyIpc] = 10;
  numbers[kSurveyPool] = 17;
  numbers[kSurveyManaged] = 8;
  numbers[kSurveyHandles] = 14;
  numbers[kSurveyMapped] = 13;
  volatile std::uint64_t values[kSurveyAttributes];
  void* volatile places[kSurveyAttributes];
  for (unsigned i = 0; i < kSurveyAttributes; ++i) {
    values[i] = 0;
    places[i] = const_cast<std::uint64_t*>(&values[i]);
  }
  const auto get = reinterpret_cast<Function>(block->get_attributes);
  const unsigned result =
      get(kSurveyAttributes, const_cast<unsigned*>(numbers), const_cast<void**>(places), at);
  block->questions = block->questions + 1;
  const std::uint64_t start = values[kSurveyStart];
  const std::uint64_t size = values[kSurveySize];
  // What is reserved and not mapped is no memory.
  const bool is_memory = values[kSurveyMapped] != 0 || values[kSurveyType] != 0;
  found = result == 0 && is_memory && size != 0 && start <= at && at - start < size;
  if (result != 0) {
    block->last_error = result;
    block->failures = block->failures + 1;
  }
  if (!found) return 0;
  // Of virtual memory the driver tells what is reserved, in which there may be mappings of all
  // kinds: that is asked for step by step.
  const bool is_virtual = values[kSurveyContext] == 0 && values[kSurveyPool] == 0;
  if (is_virtual && is_as_before(block, values)) return 0;
  if (block->answer_count < block->answer_room) {
    auto* answer = reinterpret_cast<SurveyAnswer*>(block->answers) + block->answer_count;
    answer->asked = at;
    for (unsigned i = 0; i < kSurveyAttributes; ++i)
      answer->values[i] = values[i];
    answer->handle_result =
        values[kSurveyPool] != 0 ? ask_for_handle(block, start, size) : kNotAsked;
    block->answer_count = block->answer_count + 1;
  } else {
    block->overflow = 1;
  }
  return is_virtual ? 0 : start + size;
}

INSIDE void survey(InsideBlock* block) {
  const auto* ranges = reinterpret_cast<const SurveyRange*>(block->ranges);
  for (std::uint64_t i = 0; i < block->range_count; ++i) {
    std::uint64_t at = ranges[i].start;
    // Small blocks lie in slabs, others of them wherever there was room: asked for one by one.
    std::uint64_t slab_end = 0;
    while (at < ranges[i].end) {
      if (is_cancelled(block)) return;
      bool found = false;
      const std::uint64_t end = ask(block, at, found);
      if (found) slab_end = (at / kSlab + 1) * kSlab;
      std::uint64_t next = (at / block->step + 1) * block->step;
      if (at + kUnit < slab_end) {
        if (block->dense_questions < kMostDense)
          next = at + kUnit;
        else
          block->overflow = 1;
        block->dense_questions = block->dense_questions + 1;
      }
      const std::uint64_t behind = (end + kUnit - 1) / kUnit * kUnit;
      at = found && behind > at ? behind : next;
    }
  }
}

INSIDE void close_library(InsideBlock* block) {
  if (block->job == static_cast<std::uint32_t>(InsideJob::kLoad))
    (void)call(kSysClose, static_cast<std::uint64_t>(block->descriptor), 0, 0, 0);
}

INSIDE char* put_number(char* at, std::uint32_t number) {
  std::uint32_t unit = 1;
  while (number / unit >= 10)
    unit *= 10;
  for (; unit != 0; unit /= 10)
    *at++ = static_cast<char>('0' + number / unit % 10);
  return at;
}

// "/proc/self/task/TID/fd/N": of a program in whatever mount namespace, and by a name that no other
// library has, as the loader compares them.
INSIDE void make_path(InsideBlock* block) {
  volatile std::uint64_t words[3];
  words[0] = 0x65732f636f72702f;  // "/proc/se"
  words[1] = 0x2f6b7361742f666c;  // "lf/task/"
  words[2] = 0x2f64662f;          // "/fd/"
  const volatile char* text = reinterpret_cast<const volatile char*>(words);
  char* at = block->path;
  for (int i = 0; i < 16; ++i)
    *at++ = text[i];
  at = put_number(at, static_cast<std::uint32_t>(block->tid));
  for (int i = 16; i < 20; ++i)
    *at++ = text[i];
  at = put_number(at, static_cast<std::uint32_t>(block->descriptor));
  *at = 0;
}

// "/proc/thread-self/fd/N": where /proc is that of another PID namespace than the program's own, in
// which the thread has another number.
INSIDE void make_other_path(InsideBlock* block) {
  volatile std::uint64_t words[3];
  words[0] = 0x68742f636f72702f;  // "/proc/th"
  words[1] = 0x6c65732d64616572;  // "read-sel"
  words[2] = 0x2f64662f66;        // "f/fd/"
  const volatile char* text = reinterpret_cast<const volatile char*>(words);
  char* at = block->path;
  for (int i = 0; i < 21; ++i)
    *at++ = text[i];
  at = put_number(at, static_cast<std::uint32_t>(block->descriptor));
  *at = 0;
}

INSIDE void note_error(InsideBlock* block) {
  using Function = const char* (*)();
  const char* text = reinterpret_cast<Function>(block->dlerror)();
  for (unsigned i = 0; text != nullptr && i + 1 < sizeof block->error && text[i] != 0; ++i)
    *const_cast<volatile char*>(&block->error[i]) = text[i];
}

INSIDE void load(InsideBlock* block) {
  using Open = void* (*)(const char*, int);
  using Symbol = void* (*)(void*, const char*);
  using Function = int (*)(std::uint64_t);
  constexpr int kNowAndLocal = 2;
  const auto open = reinterpret_cast<Open>(block->dlopen);
  make_path(block);
  void* library = open(block->path, kNowAndLocal);
  if (library == nullptr) {
    make_other_path(block);
    library = open(block->path, kNowAndLocal);
  }
  close_library(block);
  block->handle = address_of(library);
  if (library == nullptr) return note_error(block);
  void* function = reinterpret_cast<Symbol>(block->dlsym)(library, block->name);
  block->function = address_of(function);
  if (function == nullptr) return note_error(block);
  block->result = reinterpret_cast<Function>(function)(block->argument);
}

INSIDE void call_function(InsideBlock* block) {
  using Function = int (*)(std::uint64_t);
  block->result = reinterpret_cast<Function>(block->function)(block->argument);
}

INSIDE void* second(void* argument) {
  auto* block = static_cast<InsideBlock*>(argument);
  volatile std::uint64_t name[2];
  name[0] = 0x692d736973617473;  // "stasis-i"
  name[1] = 0x000000656469736e;  // "nside"
  (void)call(kSysPrctl, kSetName, address_of(const_cast<std::uint64_t*>(name)), 0, 0);
  block->tid = static_cast<std::int32_t>(call(kSysTid, 0, 0, 0, 0));
  set(block->state, InsideState::kBegun);
  if (is_cancelled(block)) {
    close_library(block);
    set(block->state, InsideState::kCancelled);
    return nullptr;
  }
  if (block->job == static_cast<std::uint32_t>(InsideJob::kSurvey)) survey(block);
  if (block->job == static_cast<std::uint32_t>(InsideJob::kLoad)) load(block);
  if (block->job == static_cast<std::uint32_t>(InsideJob::kCall)) call_function(block);
  set(block->state, is_cancelled(block) ? InsideState::kCancelled : InsideState::kDone);
  return nullptr;
}

// By this name above: a name of this file alone, or the linker would have to put the address in.
INSIDE void first(InsideBlock* block) asm("stasis_inside_first");
void first(InsideBlock* block) {
  // Those two are the C library's own: a thread that does not take them hangs a setuid() of
  // another.
  volatile std::uint64_t mask = ~(std::uint64_t{3} << 31);
  (void)call(kSysMask, 2, address_of(const_cast<std::uint64_t*>(&mask)), 0, 8);
  if (block->rseq_area != 0 &&
      call(kSysRseq, block->rseq_area, block->rseq_size, 0, block->rseq_signature) != 0) {
    // As the library notes it: a thread that it makes then tries none either.
    *reinterpret_cast<volatile std::int32_t*>(block->rseq_area + 4) = -2;
  }
  set(block->first_state, InsideState::kBegun);
  if (is_cancelled(block)) {
    close_library(block);
    set(block->first_state, InsideState::kCancelled);
  } else {
    using Init = int (*)(void*);
    using SetDetached = int (*)(void*, int);
    using Create = int (*)(void*, void*, void* (*)(void*), void*);
    reinterpret_cast<Init>(block->attr_init)(block->attributes);
    reinterpret_cast<SetDetached>(block->attr_set_detached)(block->attributes, 1);
    const auto create = reinterpret_cast<Create>(block->pthread_create);
    block->create_error = create(&block->thread, block->attributes, second, block);
    if (block->create_error != 0) close_library(block);
    set(block->first_state, block->create_error == 0 ? InsideState::kDone : InsideState::kFailed);
  }
  for (;;)
    (void)call(kSysExit, 0, 0, 0, 0);
}

}  // namespace
}  // namespace stasis::attach
// NOLINTEND
