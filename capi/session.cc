// Sessions, and what every call is given.

#include <unistd.h>

#include <array>

#include "base/own_files.h"
#include "capi/handles.h"
#include "driver/bounded_driver.h"

namespace stasis::capi {
namespace {

// A child that was forked has copies of our handles. What it destroys of them must not end the
// processes that make our calls.
std::shared_ptr<Driver> shared(std::unique_ptr<Driver> driver) {
  const auto destroy = [owner = ::getpid()](Driver* one) {
    if (::getpid() == owner) delete one;
  };
  return {driver.release(), destroy};
}

DriverTimeouts timeouts_of(const stasis_session_options& options) {
  return {ms(options.answer_timeout_ms), ms(options.work_timeout_ms)};
}

bool waits_for_ever(const DriverTimeouts& timeouts) {
  return timeouts.answer.count() == 0 && timeouts.work.count() == 0;
}

Result<std::shared_ptr<Driver>> open_driver(const stasis_session_options& options) {
  const std::string library = options.library == nullptr ? "" : options.library;
  STASIS_TRY_ASSIGN(auto driver, load_driver(library));
  const DriverTimeouts timeouts = timeouts_of(options);
  if (waits_for_ever(timeouts)) return shared(std::move(driver));
  const std::string program = own_file("stasis-driver-calls");
  STASIS_TRY_ASSIGN(auto bounded, bound_driver_by(program, library, driver, timeouts));
  return shared(std::move(bounded));
}

}  // namespace

Result<std::vector<GpuMapEntry>> gpu_map(const stasis_gpu_pair* pairs, std::size_t count) {
  std::vector<GpuMapEntry> out;
  if (count > 0 && pairs == nullptr) return misuse("there are pairs of GPUs, and no pointer");
  for (std::size_t i = 0; i < count; ++i) {
    if (pairs[i].from == nullptr || pairs[i].to == nullptr) {
      return misuse(fmt::format("pair {} of GPUs lacks a name", i));
    }
    out.push_back({pairs[i].from, pairs[i].to});
  }
  return out;
}

Result<std::vector<std::string>> strings(const char* const* texts, std::size_t count,
                                         const char* what) {
  std::vector<std::string> out;
  if (count > 0 && texts == nullptr) return misuse(fmt::format("{}: no pointer", what));
  for (std::size_t i = 0; i < count; ++i) {
    if (texts[i] == nullptr) return misuse(fmt::format("{}: number {} is NULL", what, i));
    out.emplace_back(texts[i]);
  }
  return out;
}

Result<std::unique_ptr<Call>> Call::make(const stasis_call* call) {
  STASIS_TRY_ASSIGN(auto read, read_options(call, stasis_call_init, "stasis_call"));
  return std::unique_ptr<Call>(new Call(read));
}

void Call::update(std::string_view phase, std::uint64_t done, std::uint64_t total) {
  // Waiting, of which there is nothing to count. A callback that divides by the total of a suspend
  // must not meet a zero.
  if (given_.progress == nullptr || (done == 0 && total == 0)) return;
  given_.progress(std::string(phase).c_str(), done, total, given_.user_data);
}

Environment Call::environment(const stasis_session& session) {
  session_.timeouts = session.timeouts;
  session_.start_movers_by([&session]() -> Result<std::shared_ptr<direct::MoverProcess>> {
    const std::string program = own_file("stasis-driver-calls");
    const std::array<std::string, 2> arguments{session.library, "mover"};
    STASIS_TRY_ASSIGN(auto mover, direct::MoverProcess::start_program(program, arguments));
    return std::make_shared<direct::MoverProcess>(std::move(mover));
  });
  return session_.environment(*session.driver);
}

namespace {

// Starts the program that comes with the library, to be what `role` says.
std::function<Result<HelperProcess>()> helper_starter(const std::string& library,
                                                      const std::string& role) {
  return [library, role]() -> Result<HelperProcess> {
    const std::string program = own_file("stasis-driver-calls");
    const std::array<std::string, 2> arguments{library, role};
    return HelperProcess::start_program(program, arguments);
  };
}

std::optional<DriverTimeouts> timeouts_of_helpers(const stasis_session& session) {
  std::optional<DriverTimeouts> timeouts;
  if (!waits_for_ever(session.timeouts)) timeouts = session.timeouts;
  return timeouts;
}

}  // namespace

void Call::note(const std::string& text) const {
  if (given_.note) given_.note(text.c_str(), given_.user_data);
}

job::SwapCaller Call::swap_caller(const stasis_session& session) {
  return {interrupt(),
          *this,
          session_.ring_bytes,
          timeouts_of_helpers(session),
          helper_starter(session.library, "swap-side"),
          [this](const std::string& text) { note(text); },
          [](const std::string&) {},
          [](const nlohmann::json&) {}};
}

job::InsideCaller Call::inside_caller(const stasis_session& session) {
  return {interrupt(),
          *this,
          session_.ring_bytes,
          timeouts_of_helpers(session),
          helper_starter(session.library, "inside"),
          [this](const std::string& text) { note(text); }};
}

}  // namespace stasis::capi

using namespace stasis;  // NOLINT(google-build-using-namespace): what follows is C's

void stasis_call_init(stasis_call* call, size_t size) {
  capi::write_defaults(call, size, stasis_call{});
}

void stasis_session_options_init(stasis_session_options* options, size_t size) {
  const DriverTimeouts timeouts;
  stasis_session_options defaults{};
  defaults.answer_timeout_ms = static_cast<std::uint32_t>(timeouts.answer.count());
  defaults.work_timeout_ms = static_cast<std::uint32_t>(timeouts.work.count());
  capi::write_defaults(options, size, defaults);
}

stasis_error* stasis_session_open(const stasis_session_options* options, stasis_session** session) {
  return capi::guarded([&]() -> Result<void> {
    if (session == nullptr) return capi::misuse("no pointer for the session");
    STASIS_TRY_ASSIGN(auto read, capi::read_options(options, stasis_session_options_init,
                                                    "stasis_session_options"));
    STASIS_TRY_ASSIGN(auto driver, capi::open_driver(read));
    *session = new stasis_session{std::move(driver), read.library ? read.library : "",
                                  capi::timeouts_of(read)};
    return {};
  });
}

void stasis_session_close(stasis_session* session) { delete session; }

const char* stasis_session_driver_version(const stasis_session* session) {
  return session == nullptr ? "" : session->driver->info().driver_version.c_str();
}
int stasis_session_cuda_version(const stasis_session* session) {
  return session == nullptr ? 0 : session->driver->info().cuda_version;
}
bool stasis_session_is_simulated(const stasis_session* session) {
  return session != nullptr && session->driver->info().simulated;
}
