// SPDX-License-Identifier: GPL-2.0-or-later
#include "attach_first.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/json_record.h"
#include "base/own_files.h"
#include "criu_api.h"
#include "held_tree.h"

namespace stasis::plugin {
namespace {

constexpr const char* kAttachOption = "attach";
constexpr const char* kAttachVariable = "STASIS_ATTACH";
constexpr std::string_view kSafe = "graphs-are-safe";
constexpr std::string_view kWatch = "watch-graphs=";
constexpr std::size_t kMostOutput = 1 << 20;
constexpr std::int64_t kCriusOwn = 10;  // seconds of its --timeout

// What `stasis attach --json` prints, as far as it is used here.
struct Refusal {
  std::string code;
  std::string message;
  std::string remedy;
};
void fields(auto& io, Described<Refusal> auto& refusal) {
  io("code", refusal.code);
  io("message", refusal.message);
  io("remedy", refusal.remedy);
}
struct Answer {
  bool ok = false;
  std::vector<std::string> notes;
  std::optional<Refusal> error;
};
void fields(auto& io, Described<Answer> auto& answer) {
  io("ok", answer.ok);
  io.optional("notes", answer.notes);
  io.optional("error", answer.error);
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (auto at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

constexpr std::string_view kIgnore = "--ignore-obstacles";
constexpr std::string_view kDriverTimeout = "--driver-timeout";

// Which names options of the command line.
std::string in_our_words(std::string remedy) {
  replace_all(remedy, kIgnore, "STASIS_IGNORE_OBSTACLES=1 in criu's environment");
  replace_all(remedy, "--graphs-are-safe", fmt::format("{}={}", kAttachVariable, kSafe));
  replace_all(remedy, "--watch-graphs ", fmt::format("{}={}", kAttachVariable, kWatch));
  replace_all(remedy, kDriverTimeout,
              fmt::format("{} in criu's environment", kDriverTimeoutVariable));
  return remedy;
}

Error error_of(const Refusal& refusal) {
  Error error{ErrorCode::kInternal, refusal.message, in_our_words(refusal.remedy)};
  for (const ErrorInfo& info : error_catalogue())
    if (info.name == refusal.code) error.code = info.code;
  // What is in the way of the dump itself, it meets without that, too.
  const bool is_attachs = error.code == ErrorCode::kNotSupported ||
                          error.code == ErrorCode::kTimeout || error.code == ErrorCode::kWrongState;
  if (is_attachs && refusal.remedy.find(kIgnore) == std::string::npos) {
    error.remedy += fmt::format("{}without {} the driver saves its GPU memory",
                                error.remedy.empty() ? "" : "; ", kAttachVariable);
  }
  return error;
}

// It rings for the time in which CRIU stops threads, and none is stopped yet.
class AlarmOff {
 public:
  AlarmOff() {
    const itimerval none{};
    set_ = ::setitimer(ITIMER_REAL, &none, &left_) == 0;
  }
  ~AlarmOff() {
    if (set_) (void)::setitimer(ITIMER_REAL, &left_, nullptr);
  }
  // In whole seconds, as criu was given them.
  std::int64_t seconds() const {
    return left_.it_value.tv_sec + (left_.it_value.tv_usec > 0 ? 1 : 0);
  }
  AlarmOff(const AlarmOff&) = delete;
  AlarmOff& operator=(const AlarmOff&) = delete;

 private:
  itimerval left_{};
  bool set_ = false;
};

// In the child, a copy of criu with one thread: nothing but system calls.
[[noreturn]] void become(char* const* argv, int null, int out, int err, pid_t parent) {
  // If criu is killed, it takes back what it has begun.
  (void)::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(EXIT_FAILURE);
  // What criu was started to ignore (nohup), it ignores as well, but for that.
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction old {};
    const bool ignored = ::sigaction(number, nullptr, &old) == 0 && old.sa_handler == SIG_IGN;
    if (!ignored || number == SIGTERM) (void)::signal(number, SIG_DFL);
  }
  sigset_t none;
  ::sigemptyset(&none);
  (void)::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (::dup2(null, STDIN_FILENO) >= 0 && ::dup2(out, STDOUT_FILENO) >= 0 &&
      ::dup2(err, STDERR_FILENO) >= 0 &&
      ::syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC) == 0)
    ::execv(argv[0], argv);
  ::_exit(EXIT_FAILURE);
}

Result<std::string> text_in(const UniqueFd& file) {
  std::string text(kMostOutput, '\0');
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), 0);
  if (got < 0) return fail(errno_error("cannot read what `stasis attach` has said", errno));
  text.resize(static_cast<std::size_t>(got));
  return text;
}

struct Said {
  std::string out;
  std::string err;
  int status = 0;
};
Result<Said> run(std::vector<std::string> words) {
  std::vector<char*> argv;
  for (std::string& word : words)
    argv.push_back(word.data());
  argv.push_back(nullptr);
  // Above the three that the child fills.
  constexpr int kAbove = 3;
  const auto memory_file = [] {
    const UniqueFd made(::memfd_create("stasis-attach", MFD_CLOEXEC));
    return UniqueFd(::fcntl(made.get(), F_DUPFD_CLOEXEC, kAbove));
  };
  const UniqueFd out = memory_file();
  const UniqueFd err = memory_file();
  const UniqueFd opened(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const UniqueFd null(::fcntl(opened.get(), F_DUPFD_CLOEXEC, kAbove));
  if (!out.valid() || !err.valid() || !null.valid())
    return fail(errno_error("cannot make a memory file", errno));
  const pid_t parent = ::getpid();
  // CRIU takes notice of the end of a child from the time on at which it has stopped threads, and
  // not yet. Not fork(), which would run what libraries have registered for it.
  const auto child =
      static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, 0));
  if (child < 0) return fail(errno_error("cannot start a process", errno));
  if (child == 0) become(argv.data(), null.get(), out.get(), err.get(), parent);
  Said said;
  while (::waitpid(child, &said.status, 0) < 0) {
    if (errno != EINTR) return fail(errno_error("cannot wait for `stasis attach`", errno));
  }
  STASIS_TRY_ASSIGN(said.out, text_in(out));
  STASIS_TRY_ASSIGN(said.err, text_in(err));
  return said;
}

// Why there is no answer.
std::string last_words(const Said& said) {
  if (WIFSIGNALED(said.status))
    return fmt::format("it was ended by signal {}", WTERMSIG(said.status));
  return said.err.empty() ? "it said nothing" : said.err.substr(0, said.err.find('\n'));
}

}  // namespace

Result<std::vector<std::string>> asked_attach_options() {
  STASIS_TRY_ASSIGN(const auto option, plugin_option(kAttachOption));
  const char* variable = std::getenv(kAttachVariable);
  const std::string word = option ? *option : variable != nullptr ? variable : "";
  if (word.empty()) return std::vector<std::string>();
  if (word == kSafe) return std::vector<std::string>{"--graphs-are-safe"};
  if (word.starts_with(kWatch))
    return std::vector<std::string>{"--watch-graphs", word.substr(kWatch.size())};
  return fail(
      ErrorCode::kUsage,
      fmt::format("{} is '{}', which is no word on the program's CUDA graphs",
                  option ? fmt::format("{}.{}", kName, kAttachOption) : kAttachVariable, word),
      fmt::format("let it be {} if the program uses none, or none with a copy from or to the host; "
                  "or {}30s, a time in which it would launch each of its graphs",
                  kSafe, kWatch));
}

Result<void> attach_first(Pid root, const std::vector<std::string>& options) {
  const std::string program = own_program("stasis");
  if (::access(program.c_str(), X_OK) != 0) {
    return fail(ErrorCode::kIo,
                fmt::format("{} asks for `stasis attach`, and there is no program {}",
                            kAttachVariable, program),
                fmt::format("install the package stasis, or unset {}", kAttachVariable));
  }
  std::vector<std::string> words = {program, "attach", std::to_string(root.value), "--json"};
  words.insert(words.end(), options.begin(), options.end());
  if (const auto asked = asked_driver_timeout()) {
    words.emplace_back(kDriverTimeout);
    words.push_back(std::to_string(asked->count()));
  }
  const AlarmOff quiet;
  // More than criu's own, which is that of `stasis attach`, is meant for its lock, too.
  if (quiet.seconds() > kCriusOwn) {
    words.emplace_back("--timeout");
    words.push_back(fmt::format("{}s", quiet.seconds()));
  }
  STASIS_TRY_ASSIGN(const auto said, run(std::move(words)));
  const auto answer = record_from_text<Answer>(said.out);
  if (!answer || (!answer->ok && !answer->error)) {
    return fail(ErrorCode::kInternal,
                fmt::format("`stasis attach` has not answered: {}", last_words(said)),
                fmt::format("run `stasis recover {0}`, which undoes what it has left, and see what "
                            "`{1} attach {0}` says",
                            root.value, program));
  }
  // What remains uncertain: CRIU's log has warnings, where nothing else is asked of it.
  for (const std::string& note : answer->notes)
    log_warning("stasis attach: " + note);
  if (answer->error) return fail(error_of(*answer->error));
  return {};
}

}  // namespace stasis::plugin
