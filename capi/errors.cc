// Errors, codes and strings.
#include <csignal>
#include <cstdlib>
#include <ctime>

#include "base/error.h"
#include "base/version.h"
#include "capi/handles.h"
#include "report/report.h"

namespace stasis::capi {
namespace {

// tools/check.d/c-abi compares the names.
static_assert(static_cast<int>(ErrorCode::kNotRolledBack) + 1 == STASIS_NOT_ROLLED_BACK);

const ErrorInfo* info_of(stasis_code code) {
  for (const ErrorInfo& info : error_catalogue())
    if (code_of(info.code) == code) return &info;
  return nullptr;
}

// Made beforehand: where there is no memory, none is left for this one either. Never destroyed,
// because the program may still hold it when it ends.
stasis_error& out_of_memory() {
  static auto* const error = new stasis_error{
      {ErrorCode::kOutOfHostMemory, "this program has no memory left", "free some"},
      "this program has no memory left"};
  return *error;
}
[[maybe_unused]] const stasis_error& made_when_loaded = out_of_memory();

sigset_t file_size_signal() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGXFSZ);
  return set;
}

// Of this thread's own or the process's; only the former is ours, and looks the same.
bool waits() {
  sigset_t waiting;
  return ::sigpending(&waiting) == 0 && ::sigismember(&waiting, SIGXFSZ) == 1;
}

}  // namespace

FileSizeSignalHeld::FileSizeSignalHeld() : waited_before_(waits()) {
  const sigset_t held = file_size_signal();
  ::pthread_sigmask(SIG_BLOCK, &held, &before_);
}

FileSizeSignalHeld::~FileSizeSignalHeld() {
  constexpr timespec kAtOnce{0, 0};
  const sigset_t held = file_size_signal();
  if (!waited_before_ && waits()) (void)::sigtimedwait(&held, nullptr, &kAtOnce);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

stasis_code code_of(ErrorCode code) { return static_cast<stasis_code>(static_cast<int>(code) + 1); }

stasis_error* make_out_of_memory_error() noexcept { return &out_of_memory(); }

stasis_error* make_error(Error error) noexcept {
  try {
    std::string message = error.to_string();
    return new stasis_error{std::move(error), std::move(message)};
  } catch (...) {
    return &out_of_memory();
  }
}

Result<void> give_text(const std::string& text, char** out) {
  if (out == nullptr) return {};
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
  return {};
}

}  // namespace stasis::capi

using namespace stasis;  // NOLINT(google-build-using-namespace): what follows is C's

const char* stasis_version(void) { return kVersion; }

stasis_code stasis_error_code(const stasis_error* error) {
  return error == nullptr ? STASIS_OK : capi::code_of(error->error.code);
}
const char* stasis_error_message(const stasis_error* error) {
  return error == nullptr ? "" : error->message.c_str();
}
const char* stasis_error_remedy(const stasis_error* error) {
  return error == nullptr ? "" : error->error.remedy.c_str();
}
int stasis_error_driver_number(const stasis_error* error) {
  return error == nullptr || !error->error.driver ? 0 : error->error.driver->number;
}
const char* stasis_error_driver_name(const stasis_error* error) {
  return error == nullptr || !error->error.driver ? "" : error->error.driver->name.c_str();
}
const char* stasis_error_driver_text(const stasis_error* error) {
  return error == nullptr || !error->error.driver ? "" : error->error.driver->text.c_str();
}
char* stasis_error_json(const stasis_error* error) {
  char* text = nullptr;
  if (error == nullptr) return text;
  stasis_error_free(
      capi::guarded([&] { return capi::give_text(json_text(to_json(error->error)), &text); }));
  return text;
}
void stasis_error_free(stasis_error* error) {
  if (error != capi::make_out_of_memory_error()) delete error;
}

// The texts of the catalogue are string literals, so they end with a zero.
const char* stasis_code_name(stasis_code code) {
  if (code == STASIS_OK) return "";
  const ErrorInfo* info = capi::info_of(code);
  return info == nullptr ? nullptr : info->name.data();
}
const char* stasis_code_meaning(stasis_code code) {
  if (code == STASIS_OK) return "";
  const ErrorInfo* info = capi::info_of(code);
  return info == nullptr ? nullptr : info->meaning.data();
}
int stasis_code_exit_status(stasis_code code) {
  if (code == STASIS_OK) return 0;
  const ErrorInfo* info = capi::info_of(code);
  return info == nullptr ? 1 : info->exit_status;
}

void stasis_free(char* text) { std::free(text); }

stasis_cancel* stasis_cancel_new(void) { return new (std::nothrow) stasis_cancel; }
void stasis_cancel_request(stasis_cancel* cancel) {
  // No signal of its own that it could name: what is asked for is what Ctrl-C asks for.
  constexpr int kInterruptSignal = 2;
  if (cancel != nullptr) cancel->interrupt.request(kInterruptSignal);
}
void stasis_cancel_free(stasis_cancel* cancel) { delete cancel; }
