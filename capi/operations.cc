// The whole procedures.
#include <fcntl.h>
#include <unistd.h>

#include <iterator>
#include <list>

#include "base/fd.h"
#include "capi/handles.h"
#include "image/criu_options.h"
#include "job/images.h"
#include "job/inside.h"
#include "job/swap.h"
#include "operations/agent_library.h"
#include "proc/procfs.h"
#include "report/report.h"

namespace stasis::capi {
namespace {

std::string text(const char* given) { return given == nullptr ? "" : given; }

std::optional<std::string> path(const char* given) {
  if (given == nullptr) return std::nullopt;
  return given;
}

Result<void> check_target(const stasis_session* session, int pid) {
  if (session == nullptr) return misuse("there is no session");
  if (pid <= 0) return misuse(fmt::format("a process number is positive, and not {}", pid));
  return {};
}

// Whom a call is about. A job that lives in namespaces of its own is reached by its name only.
using FindTarget = std::function<Result<job::Target>(const stasis_session*)>;

FindTarget by_number(int pid) {
  return [pid](const stasis_session* session) -> Result<job::Target> {
    STASIS_TRY(check_target(session, pid));
    return job::Target{std::to_string(pid), Pid{pid}, {}};
  };
}

Result<job::Target> named(const stasis_session* session, const char* name) {
  if (session == nullptr) return misuse("there is no session");
  if (name == nullptr) return misuse("there is no name");
  if (!job::is_target(name)) {
    return misuse(
        fmt::format("'{}' is neither the name of a job nor the number of a process", name));
  }
  return job::Target{name, {}, {}};
}

FindTarget by_name(const char* name) {
  return [name](const stasis_session* session) -> Result<job::Target> {
    STASIS_TRY_ASSIGN(auto target, named(session, name));
    STASIS_TRY(target.find());
    return target;
  };
}

// The name for the manifest.
std::string name_of(const job::Target& target) {
  return target.job ? target.job->name : job::name_of_job(target.pid);
}

// It would be suspended while it waits for the end, and nothing would let it go on. The side of a
// swap that does it is another process, which does not know who has asked.
Result<void> refuse_from_within(int root) {
  STASIS_TRY_ASSIGN(auto tree, proc::ProcFs().tree(Pid{root}));
  const bool within = std::any_of(tree.begin(), tree.end(), [](const proc::ProcessInfo& info) {
    return info.pid.value == ::getpid();
  });
  if (!within) return {};
  return fail(ErrorCode::kUsage,
              fmt::format("a swap that suspends process {} cannot be done from within its tree: "
                          "this program ({}) would be suspended, too",
                          root, ::getpid()),
              "have a process do it that is not below that one");
}

Result<void> give_report(const job::InsideReport& done, char** to) {
  if (const auto* recovered = std::get_if<RecoverReport>(&done))
    return give_text(json_text(to_json(std::vector{*recovered})), to);
  if (const auto* dumped = std::get_if<DumpReport>(&done))
    return give_text(json_text(to_json(*dumped)), to);
  return give_text(json_text(to_json(std::get<Report>(done))), to);
}

template <class Choice>
Result<std::optional<Choice>> read_choice(const char* given) {
  if (given == nullptr) return std::optional<Choice>();
  auto choice = choice_from_name<Choice>(given);
  if (choice) return choice;
  constexpr const char* kKind =
      std::is_same_v<Choice, CgroupMode> ? "way to manage cgroups" : "network lock";
  return fail(ErrorCode::kUsage, fmt::format("'{}' is no {}", given, kKind),
              fmt::format("one of {}", fmt::join(choice_names<Choice>(), ", ")));
}

// An option of CRIU's from its member; the whole is for what takes two members.
template <class T>
Result<void> take(const stasis_dump_options&, T given, T& to) {
  to = given;
  return {};
}
template <class Choice>
Result<void> take(const stasis_dump_options&, const char* given, Choice& to) {
  STASIS_TRY_ASSIGN(const auto choice, read_choice<Choice>(given));
  to = choice.value_or(to);
  return {};
}
Result<void> take(const stasis_dump_options& whole, const char* const* given,
                  std::vector<std::string>& to) {
  STASIS_TRY_ASSIGN(to, strings(given, whole.external_count, "stasis_dump_options.external"));
  return {};
}

// A member that is a pointer stays null, which stands for the default.
template <class T, class Member>
void put_default(const T& value, Member& member) {
  if constexpr (std::is_same_v<T, Member>) member = value;
}

// Of any options that have them.
Result<std::optional<AttachWay>> attach_way(const auto& given) {
  if (!given.attach) return std::optional<AttachWay>();
  AttachWay way;
  if (given.watch_ms != 0) way.watch = ms(given.watch_ms);
  way.graphs_are_safe = given.graphs_are_safe;
  STASIS_TRY_ASSIGN(way.library, open_agent_library());
  return std::optional(std::move(way));
}

Result<DumpOptions> read(const stasis_dump_options& given) {
  if (given.images_dir == nullptr) return misuse("stasis_dump_options.images_dir is not set");
  if (given.after < STASIS_AFTER_DUMP_END || given.after > STASIS_AFTER_DUMP_SUSPENDED) {
    return misuse(fmt::format("stasis_dump_options.after is {}", static_cast<int>(given.after)));
  }
  DumpOptions out;
  out.images_dir = given.images_dir;
  out.overwrite = given.overwrite;
  out.sync = given.sync ? SyncPolicy::kDisk : SyncPolicy::kNone;
  out.after = given.after == STASIS_AFTER_DUMP_END       ? AfterDump::kKill
              : given.after == STASIS_AFTER_DUMP_RUNNING ? AfterDump::kRunning
                                                         : AfterDump::kSuspended;
  out.timeout = ms(given.timeout_ms);
  out.ignore_obstacles = given.ignore_obstacles;
  out.ignore_undumpable = given.ignore_undumpable || given.ignore_obstacles;
  if (given.compress != nullptr) {
    const auto compression = compression_from_name(given.compress);
    if (!compression) {
      return fail(ErrorCode::kUsage, fmt::format("'{}' is no way to compress", given.compress),
                  "one of none, lz4, zstd");
    }
    out.compression = *compression;
  }
  out.base = path(given.base);
  STASIS_TRY_ASSIGN(out.attach, attach_way(given));
  out.criu_path = path(given.criu);
#define STASIS_CRIU_OPTION(field, type, initial, number, member, flag, help) \
  STASIS_TRY(take(given, given.member, out.criu.field));
#include "image/criu_options.inc"
  return out;
}

// `copies` keeps what `inherit` refers to; a list, so that addresses stay.
Result<RestoreOptions> read(const stasis_restore_options& given, std::list<UniqueFd>& copies) {
  if (given.images_dir == nullptr) return misuse("stasis_restore_options.images_dir is not set");
  RestoreOptions out;
  out.images_dir = job::image_in(given.images_dir);
  STASIS_TRY_ASSIGN(auto map, gpu_map(given.gpu_pairs, given.gpu_pair_count));
  out.gpu_map = std::move(map);
  out.leave_suspended = given.leave_suspended;
  out.criu_path = path(given.criu);
  out.tcp_close = given.tcp_close;
  out.ext_unix_sk = given.ext_unix_sk;
  STASIS_TRY_ASSIGN(out.cgroups, read_choice<CgroupMode>(given.manage_cgroups));
  STASIS_TRY_ASSIGN(auto external, strings(given.external, given.external_count,
                                           "stasis_restore_options.external"));
  out.external = std::move(external);
  STASIS_TRY_ASSIGN(const auto addresses, strings(given.map_addresses, given.map_address_count,
                                                  "stasis_restore_options.map_addresses"));
  for (const std::string& text : addresses) {
    STASIS_TRY_ASSIGN(auto pair, parse_address_pair(text));
    out.addresses.push_back(std::move(pair));
  }
  if (given.inherit_count > 0 && given.inherit == nullptr) return misuse("inherit: no pointer");
  for (std::size_t i = 0; i < given.inherit_count; ++i) {
    if (given.inherit[i].key == nullptr) return misuse(fmt::format("inherit: {} has no key", i));
    UniqueFd copy(::fcntl(given.inherit[i].fd, F_DUPFD_CLOEXEC, 3));
    if (!copy.valid()) {
      return fail(ErrorCode::kUsage,
                  fmt::format("descriptor {} to inherit is not open", given.inherit[i].fd),
                  "open it first");
    }
    copies.push_back(std::move(copy));
    out.inherit.push_back({given.inherit[i].key, &copies.back()});
  }
  return out;
}

stasis_error* suspend_it(stasis_session* session, const FindTarget& find,
                         const stasis_suspend_options* options, const stasis_call* call,
                         char** report) {
  return guarded([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(const auto target, find(session));
    STASIS_TRY_ASSIGN(auto read,
                      read_options(options, stasis_suspend_options_init, "stasis_suspend_options"));
    STASIS_TRY_ASSIGN(auto given, Call::make(call));
    SuspendOptions how{ms(read.timeout_ms), read.ignore_obstacles};
    STASIS_TRY_ASSIGN(how.attach, attach_way(read));
    if (target.is_elsewhere()) {
      STASIS_TRY_ASSIGN(auto done, job::operate_inside(given->inside_caller(*session), target,
                                                       {job::InsideVerb::kSuspend, how}));
      return give_report(done, report);
    }
    STASIS_TRY_ASSIGN(auto done, suspend(given->environment(*session), target.pid, how));
    return give_text(json_text(to_json(done)), report);
  });
}

stasis_error* resume_it(stasis_session* session, const FindTarget& find,
                        const stasis_resume_options* options, const stasis_call* call,
                        char** report) {
  return guarded([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(const auto target, find(session));
    STASIS_TRY_ASSIGN(auto read,
                      read_options(options, stasis_resume_options_init, "stasis_resume_options"));
    STASIS_TRY_ASSIGN(auto map, gpu_map(read.gpu_pairs, read.gpu_pair_count));
    STASIS_TRY_ASSIGN(auto given, Call::make(call));
    ResumeOptions how;
    how.gpu_map = std::move(map);
    how.images_dir = text(read.images_dir);
    if (target.is_elsewhere()) {
      job::InsideOrder order{job::InsideVerb::kResume, {}, std::move(how), ms(read.time_limit_ms)};
      STASIS_TRY_ASSIGN(auto done,
                        job::operate_inside(given->inside_caller(*session), target, order));
      return give_report(done, report);
    }
    given->interrupt().set_time_limit(ms(read.time_limit_ms));
    STASIS_TRY_ASSIGN(auto done, resume(given->environment(*session), target.pid, how));
    return give_text(json_text(to_json(done)), report);
  });
}

stasis_error* dump_it(stasis_session* session, const FindTarget& find,
                      const stasis_dump_options* options, const stasis_call* call, char** report) {
  return guarded([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(const auto target, find(session));
    STASIS_TRY_ASSIGN(auto given_options,
                      read_options(options, stasis_dump_options_init, "stasis_dump_options"));
    STASIS_TRY_ASSIGN(auto how, read(given_options));
    how.job_name = name_of(target);
    STASIS_TRY_ASSIGN(auto given, Call::make(call));
    if (target.is_elsewhere()) {
      job::InsideOrder order{job::InsideVerb::kDump};
      order.dump = std::move(how);
      STASIS_TRY_ASSIGN(auto done,
                        job::operate_inside(given->inside_caller(*session), target, order));
      return give_report(done, report);
    }
    STASIS_TRY_ASSIGN(auto done, dump(given->environment(*session), target.pid, how));
    return give_text(json_text(to_json(done)), report);
  });
}

stasis_error* swap_them(stasis_session* session, const job::Target& out, const job::Target& in,
                        const stasis_swap_options* options, const stasis_call* call,
                        char** report) {
  return guarded([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(auto read,
                      read_options(options, stasis_swap_options_init, "stasis_swap_options"));
    STASIS_TRY_ASSIGN(auto map, gpu_map(read.gpu_pairs, read.gpu_pair_count));
    STASIS_TRY_ASSIGN(auto given, Call::make(call));
    job::SwapOptions how;
    how.timeout = ms(read.timeout_ms);
    how.ignore_obstacles = read.ignore_obstacles;
    STASIS_TRY_ASSIGN(how.attach, attach_way(read));
    how.gpu_map = gpu_map_text(map);
    STASIS_TRY_ASSIGN(auto done, job::swap(given->swap_caller(*session), out, in, how));
    return give_text(json_text(to_json(done)), report);
  });
}

Error not_recovered(const std::vector<RecoverReport>& reports) {
  Error out{ErrorCode::kNotRolledBack, {}, {}};
  for (const RecoverReport& report : reports) {
    if (!report.error) continue;
    out.message += (out.message.empty() ? "" : "; ") + report.error->to_string();
    out.remedy += (out.remedy.empty() ? "" : "; ") + report.error->remedy;
  }
  return out;
}

}  // namespace
}  // namespace stasis::capi

using namespace stasis;  // NOLINT(google-build-using-namespace): what follows is C's

void stasis_suspend_options_init(stasis_suspend_options* options, size_t size) {
  const SuspendOptions ours;
  stasis_suspend_options defaults{};
  defaults.timeout_ms = static_cast<std::uint32_t>(ours.timeout.count());
  capi::write_defaults(options, size, defaults);
}

stasis_error* stasis_suspend(stasis_session* session, int pid,
                             const stasis_suspend_options* options, const stasis_call* call,
                             char** report) {
  return capi::suspend_it(session, capi::by_number(pid), options, call, report);
}

void stasis_resume_options_init(stasis_resume_options* options, size_t size) {
  capi::write_defaults(options, size, stasis_resume_options{});
}

stasis_error* stasis_resume(stasis_session* session, int pid, const stasis_resume_options* options,
                            const stasis_call* call, char** report) {
  return capi::resume_it(session, capi::by_number(pid), options, call, report);
}

void stasis_swap_options_init(stasis_swap_options* options, size_t size) {
  stasis_swap_options defaults{};
  defaults.timeout_ms = static_cast<std::uint32_t>(job::SwapOptions().timeout.count());
  capi::write_defaults(options, size, defaults);
}

stasis_error* stasis_swap(stasis_session* session, int out_pid, int in_pid,
                          const stasis_swap_options* options, const stasis_call* call,
                          char** report) {
  const auto checked = [&]() -> Result<void> {
    for (const int pid : {out_pid, in_pid})
      STASIS_TRY(capi::check_target(session, pid));
    return capi::refuse_from_within(out_pid);
  };
  if (stasis_error* error = capi::guarded(checked)) return error;
  return capi::swap_them(session, {std::to_string(out_pid), {}, {}},
                         {std::to_string(in_pid), {}, {}}, options, call, report);
}

void stasis_dump_options_init(stasis_dump_options* options, size_t size) {
  const DumpOptions ours;
  stasis_dump_options defaults{};
  defaults.timeout_ms = static_cast<std::uint32_t>(ours.timeout.count());
  defaults.sync = true;
#define STASIS_CRIU_OPTION(field, type, initial, number, member, flag, help) \
  capi::put_default(ours.criu.field, defaults.member);
#include "image/criu_options.inc"
  capi::write_defaults(options, size, defaults);
}

stasis_error* stasis_dump(stasis_session* session, int pid, const stasis_dump_options* options,
                          const stasis_call* call, char** report) {
  return capi::dump_it(session, capi::by_number(pid), options, call, report);
}

void stasis_restore_options_init(stasis_restore_options* options, size_t size) {
  capi::write_defaults(options, size, stasis_restore_options{});
}

stasis_error* stasis_restore(stasis_session* session, const stasis_restore_options* options,
                             const stasis_call* call, char** report) {
  return capi::guarded([&]() -> Result<void> {
    if (session == nullptr) return capi::misuse("there is no session");
    STASIS_TRY_ASSIGN(auto read, capi::read_options(options, stasis_restore_options_init,
                                                    "stasis_restore_options"));
    std::list<UniqueFd> copies;
    STASIS_TRY_ASSIGN(auto ours, capi::read(read, copies));
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    given->interrupt().set_time_limit(capi::ms(read.time_limit_ms));
    STASIS_TRY_ASSIGN(auto done, restore(given->environment(*session), ours));
    return capi::give_text(json_text(to_json(done)), report);
  });
}

stasis_error* stasis_recover(stasis_session* session, int pid, const stasis_call* call,
                             char** report) {
  return capi::guarded([&]() -> Result<void> {
    if (session == nullptr) return capi::misuse("there is no session");
    if (pid < 0) return capi::misuse(fmt::format("{} is no process number", pid));
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    const Environment env = given->environment(*session);
    std::vector<RecoverReport> reports;
    if (pid == 0) {
      reports = job::recover_swaps(given->swap_caller(*session));
      STASIS_TRY_ASSIGN(auto all, recover_all(env));
      std::move(all.begin(), all.end(), std::back_inserter(reports));
    } else {
      STASIS_TRY_ASSIGN(auto one, recover(env, Pid{pid}));
      reports.push_back(std::move(one));
    }
    auto told = capi::give_text(json_text(to_json(reports)), report);
    const bool good = std::all_of(reports.begin(), reports.end(),
                                  [](const RecoverReport& one) { return !one.error; });
    if (!good) return fail(capi::not_recovered(reports));
    return told;
  });
}

// ---- Jobs by their names

stasis_error* stasis_suspend_job(stasis_session* session, const char* name,
                                 const stasis_suspend_options* options, const stasis_call* call,
                                 char** report) {
  return capi::suspend_it(session, capi::by_name(name), options, call, report);
}

stasis_error* stasis_resume_job(stasis_session* session, const char* name,
                                const stasis_resume_options* options, const stasis_call* call,
                                char** report) {
  return capi::resume_it(session, capi::by_name(name), options, call, report);
}

stasis_error* stasis_dump_job(stasis_session* session, const char* name,
                              const stasis_dump_options* options, const stasis_call* call,
                              char** report) {
  return capi::dump_it(session, capi::by_name(name), options, call, report);
}

stasis_error* stasis_swap_jobs(stasis_session* session, const char* out_name, const char* in_name,
                               const stasis_swap_options* options, const stasis_call* call,
                               char** report) {
  job::Target out;
  job::Target in;
  const auto checked = [&]() -> Result<void> {
    STASIS_TRY_ASSIGN(out, capi::by_name(out_name)(session));
    STASIS_TRY_ASSIGN(in, capi::named(session, in_name));
    if (!out.is_elsewhere()) STASIS_TRY(capi::refuse_from_within(out.pid.value));
    return {};
  };
  if (stasis_error* error = capi::guarded(checked)) return error;
  return capi::swap_them(session, out, in, options, call, report);
}

stasis_error* stasis_recover_job(stasis_session* session, const char* name, const stasis_call* call,
                                 char** report) {
  return capi::guarded([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(const auto target, capi::by_name(name)(session));
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    if (target.is_elsewhere()) {
      STASIS_TRY_ASSIGN(auto done, job::operate_inside(given->inside_caller(*session), target,
                                                       {job::InsideVerb::kRecover}));
      return capi::give_report(done, report);
    }
    STASIS_TRY_ASSIGN(auto one, recover(given->environment(*session), target.pid));
    if (one.error) return fail(std::move(*one.error));
    return capi::give_text(json_text(to_json(std::vector<RecoverReport>{std::move(one)})), report);
  });
}

void stasis_inspect_options_init(stasis_inspect_options* options, size_t size) {
  capi::write_defaults(options, size, stasis_inspect_options{});
}

stasis_error* stasis_inspect(stasis_session* session, const stasis_inspect_options* options,
                             const stasis_call* call, char** report) {
  return capi::guarded([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(auto read, capi::read_options(options, stasis_inspect_options_init,
                                                    "stasis_inspect_options"));
    if (read.images_dir == nullptr) {
      return capi::misuse("stasis_inspect_options.images_dir is not set");
    }
    STASIS_TRY_ASSIGN(auto map, capi::gpu_map(read.gpu_pairs, read.gpu_pair_count));
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    std::optional<Environment> env;
    if (session != nullptr) env.emplace(given->environment(*session));
    const Error no_driver{ErrorCode::kDriverMissing, "no driver was given", "open a session first"};
    STASIS_TRY_ASSIGN(auto done, inspect(env ? &*env : nullptr, no_driver,
                                         {job::image_in(read.images_dir), read.verify,
                                          std::move(map), capi::path(read.criu)},
                                         *given, given->interrupt()));
    return capi::give_text(json_text(to_json(done)), report);
  });
}
