// What is behind the handles of stasis.h, and the way from C++ to C: no exception and no Result
// crosses it. Private to capi/.
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "checkpoint/process.h"
#include "direct/mover_process.h"
#include "driver/bounded_driver.h"
#include "driver/driver.h"
#include "driver/gpu_map.h"
#include "job/inside.h"
#include "job/swap.h"
#include "operations/operations.h"
#include "operations/session.h"
#include "stasis/stasis.h"

struct stasis_error {
  stasis::Error error;
  std::string message;  // with its context
};

struct stasis_cancel {
  stasis::Interrupt interrupt;
};

struct stasis_session {
  // Handles share it, so that they may outlive the session.
  std::shared_ptr<stasis::Driver> driver;
  std::string library;  // as it was asked for; may be empty
  stasis::DriverTimeouts timeouts;
};

struct stasis_process {
  std::shared_ptr<stasis::Driver> driver;
  stasis::Process process;
};

struct stasis_group {
  std::shared_ptr<stasis::Driver> driver;
  // The root, held so that its number cannot come to mean another. The tree is looked for anew in
  // every call.
  stasis::Process root;
};

namespace stasis::capi {

stasis_code code_of(ErrorCode code);
// Never null, also without memory.
stasis_error* make_error(Error error) noexcept;
stasis_error* make_out_of_memory_error() noexcept;

// While it lives, a write beyond the caller's limit of file sizes (RLIMIT_FSIZE) is an error, and
// no signal that ends the caller: in this thread, and in those that it makes.
class FileSizeSignalHeld {
 public:
  FileSizeSignalHeld();
  ~FileSizeSignalHeld();
  FileSizeSignalHeld(const FileSizeSignalHeld&) = delete;
  FileSizeSignalHeld& operator=(const FileSizeSignalHeld&) = delete;

 private:
  sigset_t before_;
  bool waited_before_;
};

// Runs code that returns a Result<void>, and turns its result, or an exception, into the error that
// C gets.
template <class F>
stasis_error* guarded(F&& body) noexcept {
  const FileSizeSignalHeld held;
  try {
    Result<void> done = std::forward<F>(body)();
    return done ? nullptr : make_error(std::move(done.error()));
  } catch (const std::bad_alloc&) {
    return make_out_of_memory_error();
  } catch (const std::exception& exception) {
    try {
      return make_error({ErrorCode::kInternal,
                         fmt::format("stopped by an exception: {}", exception.what()),
                         "`stasis ps` shows what was left behind, and `stasis recover` mends it"});
    } catch (...) {
      return make_out_of_memory_error();
    }
  } catch (...) {
    return make_out_of_memory_error();
  }
}

inline std::chrono::milliseconds ms(std::uint32_t value) {
  return std::chrono::milliseconds(value);
}

inline tl::unexpected<Error> misuse(std::string what) {
  return fail(ErrorCode::kUsage, std::move(what), "see stasis/stasis.h");
}

// For stasis_free().
Result<void> give_text(const std::string& text, char** out);

// A struct of options as this library knows it, whatever the size of the caller's.
template <class T>
Result<T> read_options(const T* given, void (*init)(T*, std::size_t), const char* name) {
  T out;
  init(&out, sizeof out);
  if (given == nullptr) return out;
  const std::size_t size = given->size;
  if (size < sizeof(std::size_t) || size > (1U << 16)) {
    return misuse(fmt::format("{0} was not prepared by {0}_init()", name));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof out &&
      !std::all_of(bytes + sizeof out, bytes + size, [](unsigned char b) { return b == 0; })) {
    return misuse(
        fmt::format("{} has a member that is set and that this libstasis ({}) is too "
                    "old to know",
                    name, stasis_version()));
  }
  std::memcpy(&out, given, std::min(size, sizeof out));
  out.size = sizeof out;
  return out;
}

// For the _init() functions: the defaults, as far as the caller's struct has them.
template <class T>
void write_defaults(T* to, std::size_t size, T defaults) {
  if (to == nullptr || size < sizeof(std::size_t)) return;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(static_cast<void*>(to), &defaults, std::min(size, sizeof defaults));
  to->size = size;
}

Result<std::vector<GpuMapEntry>> gpu_map(const stasis_gpu_pair* pairs, std::size_t count);
Result<std::vector<std::string>> strings(const char* const* texts, std::size_t count,
                                         const char* what);

// The arguments of a call besides its options, as the library's types.
class Call final : public Progress {
 public:
  static Result<std::unique_ptr<Call>> make(const stasis_call* call);
  void update(std::string_view phase, std::uint64_t done, std::uint64_t total) override;

  Interrupt& interrupt() { return given_.cancel ? given_.cancel->interrupt : own_; }
  // For the whole procedures, which use the direct path where they can.
  Environment environment(const stasis_session& session);
  job::SwapCaller swap_caller(const stasis_session& session);
  job::InsideCaller inside_caller(const stasis_session& session);

 private:
  explicit Call(const stasis_call& given) : given_(given) {}
  void note(const std::string& text) const;

  stasis_call given_;
  Interrupt own_;
  // For one call; its mover ends with it.
  OperationSession session_{interrupt(), *this, [this](const std::string& text) {
                              if (given_.note) given_.note(text.c_str(), given_.user_data);
                            }};
};

}  // namespace stasis::capi
