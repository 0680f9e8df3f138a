// `stasis`: parses the command line, runs one verb, and is the one place where an Error becomes an
// exit status.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <exception>
#include <mutex>
#include <new>
#include <sstream>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fault_point.h"
#include "base/suggest.h"
#include "base/trace.h"
#include "base/version.h"
#include "cli/config.h"
#include "cli/help.h"
#include "cli/verbs.h"
#include "job/hold_terminal.h"

namespace stasis::cli {
namespace {

constexpr const char* kDescription =
    "Stasis suspends, saves and brings back running CUDA programs, without changing them.";

constexpr const char* kFooter =
    "`stasis help VERB` is `stasis VERB --help`, `stasis version` is `stasis -V`.\n\n"
    "Exit status: 0 done, 1 failed, 2 usage, 3 no such process, 4 does not use CUDA,\n"
    "5 not permitted, 6 wrong state, 7 time-out or busy, 8 driver, 9 CRIU, 10 image,\n"
    "11 no room (disk, GPU, process number), 12 something is left behind: run\n"
    "`stasis recover`; 128+N signal N.\n"
    "STASIS_LIBCUDA names the driver's library, STASIS_CRIU the criu program.";

int report_error(Context& context, const Error& error) {
  int status = exit_status(error.code);
  if (error.code == ErrorCode::kInterrupted && context.interrupt.requested()) {
    status = 128 + context.interrupt.signal_number();
  }
  tell_error(context, error, status);
  return status;
}

// What other programs call our verbs.
std::string verb_elsewhere(const std::string& word) {
  static constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {"start", "run"},      {"launch", "run"},     {"exec", "run"},      {"list", "ps"},
      {"ls", "ps"},          {"jobs", "ps"},        {"status", "ps"},     {"pause", "suspend"},
      {"stop", "suspend"},   {"freeze", "suspend"}, {"lock", "suspend"},  {"continue", "resume"},
      {"unpause", "resume"}, {"thaw", "resume"},    {"unlock", "resume"}, {"checkpoint", "dump"},
      {"save", "dump"},      {"snapshot", "dump"},  {"load", "restore"},  {"check", "doctor"},
      {"show", "inspect"},   {"info", "inspect"},
  };
  for (const auto& [other, ours] : kWords)
    if (word == other) return std::string(ours);
  return {};
}

// Of what the command line has too much, the verb or option that there is not, and what was
// probably meant. Nothing if it has nothing too much.
std::string what_is_unknown(CLI::App& app, const CLI::App* verb) {
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty() || unknown.front() == "--") return {};
  const std::string word = unknown.front().substr(0, unknown.front().find('='));
  const bool is_option = word.size() > 1 && word.front() == '-';
  if (!is_option && verb != nullptr) return {};
  std::vector<std::string> known;
  if (is_option) {
    for (const CLI::Option* option : (verb == nullptr ? &app : verb)->get_options())
      if (!option->get_group().empty())
        for (const std::string& name : option->get_lnames())
          known.push_back("--" + name);
  } else {
    for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; }))
      if (!one->get_group().empty()) known.push_back(one->get_name());
    known.insert(known.end(), {"help", "version"});
  }
  if (std::find(known.begin(), known.end(), word) != known.end()) return {};
  const std::string lower = CLI::detail::to_lower(word);
  std::string meant = is_option ? std::string() : verb_elsewhere(lower);
  if (meant.empty()) meant = closest(lower, known);
  return fmt::format("there is no {} '{}'{}", is_option ? "option" : "verb", word,
                     did_you_mean(meant));
}

const CLI::Option* option_of_verb(const CLI::App& app, const std::string& name) {
  for (const CLI::App* verb : app.get_subcommands())
    if (const CLI::Option* option = verb->get_option_no_throw(name)) return option;
  return nullptr;
}

// CLI11's message in the words of our help texts.
std::string message_of(const CLI::App& app, const CLI::ParseError& error) {
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    const std::vector<std::string> words = app.remaining(true);
    if (words.size() > 1) {
      return fmt::format("there are {} arguments too many: {}", words.size(),
                         fmt::join(words, " "));
    }
    return fmt::format("there is one argument too many: {}",
                       words.empty() ? std::string("?") : words.front());
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    for (const CLI::App* verb : app.get_subcommands()) {
      for (const CLI::Option* option : verb->get_options()) {
        if (!option->get_required() || option->count() > 0) continue;
        return (option->get_positional() ? option->get_name(true) : option->get_name()) +
               " is required";
      }
    }
    if (app.get_subcommands().empty()) return "a verb is required";
  }
  const std::string said = error.what();
  constexpr std::string_view kExcludes = " excludes ";
  if (const auto at = said.find(kExcludes);
      dynamic_cast<const CLI::ExcludesError*>(&error) != nullptr && at != std::string::npos) {
    return fmt::format("{} and {} do not go together", said.substr(0, at),
                       said.substr(at + kExcludes.size()));
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr) return said;
  const std::string name = said.substr(0, said.find(':'));
  if (said.find("At Most") != std::string::npos) {
    const CLI::Option* twice = option_of_verb(app, name);
    if (twice == nullptr || !twice->get_positional()) return name + " was given more than once";
    return fmt::format("there is more than one {}: {}", twice->get_name(true),
                       fmt::join(twice->results(), ", "));
  }
  if (!said.ends_with(" missing")) return said;
  const CLI::Option* option = option_of_verb(app, name);
  if (option == nullptr) return said;
  // "TEXT:{none,lz4,zstd}", or "TIME".
  std::string type = option->get_type_name();
  if (const std::size_t words = type.find('{'); words != std::string::npos)
    type = "one of " + CLI::detail::find_and_replace(
                           type.substr(words + 1, type.find('}') - words - 1), ",", ", ");
  return fmt::format("{} needs a value: {}", name, type);
}

// What the line of a verb that takes one process, or one directory, has too much of.
std::string how_many(const CLI::App* verb, const CLI::ParseError& error) {
  if (verb == nullptr) return {};
  const std::string_view said = error.what();
  const bool too_much = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
                        (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr &&
                         said.find("At Most") != std::string_view::npos);
  const CLI::Option* target = verb->get_option_no_throw("PID");
  const CLI::Option* directory = verb->get_option_no_throw("--images-dir");
  if (!too_much) return {};
  std::string out;
  if (target != nullptr) out += ", with one process or job at a time, whose whole tree is meant";
  if (directory != nullptr && directory->get_positional()) {
    out += fmt::format("{} the directory once, as {} or by {}", out.empty() ? "," : ", and",
                       directory->get_name(true), "-D");
  }
  return out;
}

Error usage_error(CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* verb = nullptr;
  for (const CLI::App* one : app.get_subcommands())
    verb = one;
  const std::string unknown = what_is_unknown(app, verb);
  return {
      ErrorCode::kUsage, unknown.empty() ? message_of(app, error) : unknown,
      fmt::format("write `{}`{}; see `stasis {}--help`", usage_of(verb == nullptr ? app : *verb),
                  unknown.empty() ? how_many(verb, error) : "",
                  verb == nullptr ? "" : verb->get_name() + " ")};
}

// The error of a value that a file has set: the command line alone is fine.
std::optional<Error> configuration_error(CLI::App& app, ConfiguredDefaults& defaults,
                                         const Configuration& configuration,
                                         std::vector<std::string> words,
                                         const CLI::ParseError& error) {
  const std::string message = error.what();
  for (const ConfigValue& value : configuration.values) {
    if (!message.starts_with("--" + value.option)) continue;
    defaults.turn_off();
    try {
      app.clear();
      app.parse(std::move(words));
    } catch (const CLI::ParseError&) {
      return std::nullopt;
    }
    return Error{ErrorCode::kUsage, fmt::format("{}: {}", value.from, message),
                 fmt::format("mend {}; `stasis config` shows what is in it", value.from)};
  }
  return std::nullopt;
}

// `stasis help`, `stasis help VERB`, `stasis version`: as other programs have it.
void take_words_for_options(std::vector<std::string>& words) {
  if (words.empty()) return;
  if (words.front() == "version") words.front() = "--version";
  if (words.front() != "help") return;
  words.erase(words.begin());
  words.insert(words.begin() + (words.empty() ? 0 : 1), "--help");
}

// "--name=" has an empty value, for which CLI11 would take the next word.
void split_empty_values(std::vector<std::string>& words) {
  for (std::size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
    std::string& word = words[i];
    if (!word.starts_with("--") || word.find('=') != word.size() - 1) continue;
    word.pop_back();
    words.insert(words.begin() + static_cast<std::ptrdiff_t>(i) + 1, std::string());
    ++i;
  }
}

struct NamedVerb {
  std::string_view name;
  Verb (*add)(CLI::App& app);
};
constexpr std::array kVerbs = {
    NamedVerb{"run", add_run},         NamedVerb{"attach", add_attach},
    NamedVerb{"ps", add_ps},           NamedVerb{"suspend", add_suspend},
    NamedVerb{"resume", add_resume},   NamedVerb{"swap", add_swap},
    NamedVerb{"dump", add_dump},       NamedVerb{"restore", add_restore},
    NamedVerb{"recover", add_recover}, NamedVerb{"doctor", add_doctor},
    NamedVerb{"explain", add_explain}, NamedVerb{"inspect", add_inspect},
    NamedVerb{"verify", add_verify},   NamedVerb{"logs", add_logs},
    NamedVerb{"report", add_report},   NamedVerb{"config", add_config},
    NamedVerb{"", add_attend},         NamedVerb{"", add_list_fault_points},
    NamedVerb{"", add_describe}};

// That which the first word names, and without one all. The options of all verbs together take
// CLI11 longer to set up than a `stasis resume` of a small program takes. A configuration file may
// name any of them.
std::vector<Verb> add_verbs(CLI::App& app, const std::vector<std::string>& words) {
  const auto is_asked = [&](const NamedVerb& verb) {
    return !words.empty() && !verb.name.empty() && words.front() == verb.name;
  };
  const bool one = std::any_of(kVerbs.begin(), kVerbs.end(), is_asked) && !is_configured() &&
                   words.front() != "config";
  std::vector<Verb> out;
  for (const NamedVerb& verb : kVerbs)
    if (!one || is_asked(verb)) out.push_back(verb.add(app));
  return out;
}

// Also where parsing ends before it comes to it.
bool wants_json(int argc, char** argv) {
  for (int i = 0; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") break;  // a program's words
    const bool is_split =
        word == "--format" && i + 1 < argc && std::string_view(argv[i + 1]) == "json";
    if (word == "--json" || word == "--format=json" || is_split) return true;
  }
  return false;
}

// For the day on which there is no more memory to be had (`ulimit -v`, vm.overcommit_memory=2): a
// roll-back needs some, and a thread of ours that gets none would end us on the spot. Nothing is
// written there, so it takes none from others.
constexpr std::size_t kReserve = std::size_t{32} << 20;
std::atomic<void*> g_reserve{nullptr};
std::atomic<Interrupt*> g_told_of_memory{nullptr};

constinit std::mutex g_reserve_mutex;
// Each thread may have failed just before another gave the reserve up.
constinit thread_local bool t_tried_again = false;

void use_reserve() {
  const std::lock_guard lock(g_reserve_mutex);
  void* reserve = g_reserve.exchange(nullptr);
  if (reserve == nullptr && t_tried_again) throw std::bad_alloc();
  t_tried_again = true;
  if (reserve == nullptr) return;
  ::munmap(reserve, kReserve);
  if (Interrupt* interrupt = g_told_of_memory.load()) interrupt->want_of_memory();
}

// The stack of the first thread grows as it is used, and where it cannot the kernel ends us without
// a word. The deepest way, a dump that looks at mappings, took 150 KiB of it, and 132 are there
// from the start.
constexpr std::size_t kStack = std::size_t{512} << 10;
constexpr std::size_t kPage = 4096;

[[gnu::noinline]] void have_stack() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_STACK, &limit) != 0) return;
  const std::size_t size = std::min<std::size_t>(kStack, limit.rlim_cur / 4);
  auto* room = static_cast<volatile char*>(__builtin_alloca(size));
  for (std::size_t used = kPage; used <= size; used += kPage)
    room[size - used] = 0;
}

void set_memory_aside(Interrupt& interrupt) {
  have_stack();
  void* at = ::mmap(nullptr, kReserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return;
  g_reserve = at;
  g_told_of_memory = &interrupt;
  std::set_new_handler(&use_reserve);
}

// The options that every verb has, also before it.
struct CommonOptions {
  bool quiet = false;
  bool log_json = false;
};

void add_common(CLI::App& command, Context& context, CommonOptions& common) {
  command.add_flag("--json", context.json, "print one JSON object instead of text");
  command.add_flag("-v,--verbose", context.verbose, "say more: phases and times");
  command.add_flag("-q,--quiet", common.quiet, "no progress and no notes");
  command.add_flag("--log-json", common.log_json,
                   "say on standard error what there is to say as one JSON object a line; where "
                   "that is systemd's journal, as fields of it");
}

std::vector<Verb> add_all(CLI::App& app, const std::vector<std::string>& words, Context& context,
                          CommonOptions& common) {
  set_help_format(app);
  app.footer(kFooter);
  app.set_help_flag("-h,--help", "print this help");
  app.set_version_flag("-V,--version", std::string("stasis ") + kVersion, "print the version");
  app.require_subcommand(1);
  std::vector<Verb> verbs = add_verbs(app, words);
  add_common(app, context, common);  // before the verb or after it
  for (const Verb& verb : verbs) {
    if (!verb.command->get_group().empty()) verb.command->group("Verbs");
    add_common(*verb.command, context, common);
    if (verb.bounds_driver) add_driver_timeout(*verb.command, context.session.timeouts);
    if (verb.measures) {
      add_trace(*verb.command, context.trace);
      add_metrics_option(*verb.command, context.metrics);
    }
    if (verb.moves) add_ring(*verb.command, context.session.ring_bytes);
  }
  return verbs;
}

// --help, --version: to be printed, with the exit status.
int print_asked(const CLI::App& app, Context& context, const CLI::ParseError& asked, bool json) {
  if (json && dynamic_cast<const CLI::CallForVersion*>(&asked) != nullptr) {
    context.print({{"version", kVersion}});
  } else {
    std::ostringstream text;
    app.exit(asked, text, text);
    std::string help = text.str();
    while (help.ends_with('\n'))
      help.pop_back();
    context.terminal.out_block(help);
  }
  return context.terminal.report_lost_output(false) ? exit_status(ErrorCode::kIo) : 0;
}

int run_verb(const Verb& verb, Context& context) {
  Terminal& terminal = context.terminal;
  const std::string name = verb.command->get_name();
  if (verb.acts) install_signal_handlers(context.interrupt, terminal);
  terminal.log_with("verb", name);
  if (auto opened = context.begin_metrics(); !opened) return report_error(context, opened.error());
  if (!context.trace.empty()) trace_begin();
  auto status = verb.run(context);
  context.end_trace(name);
  if (verb.measures) context.end_measures(name, status ? nullptr : &status.error());
  if (verb.acts && !fault_not_reached().empty()) {
    terminal.note(fmt::format("the fault of STASIS_FAULT did not come to pass: {} was not reached",
                              fault_not_reached()));
  }
  if (!status) return report_error(context, status.error());
  // It has signals as an acting verb has, and has changed nothing: it ends as `ps` does.
  if (name == "doctor" && terminal.lost_to_a_closed_pipe()) return 128 + SIGPIPE;
  const bool lost = terminal.report_lost_output(verb.acts && name != "doctor");
  return lost && *status == 0 ? exit_status(ErrorCode::kIo) : *status;
}

int run(int argc, char** argv, const Inherited& inherited) {
  Terminal terminal;
  // It may be told until the very end.
  static Interrupt interrupt;
  set_memory_aside(interrupt);
  Context context{terminal, interrupt};
  context.inherited = inherited;
  auto ring = ring_of_environment();
  if (!ring) {
    context.json = wants_json(argc, argv);
    return report_error(context, ring.error());
  }
  context.session.ring_bytes = *ring;

  CLI::App app(kDescription, "stasis");
  CommonOptions common;
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  take_words_for_options(words);
  const std::vector<Verb> verbs = add_all(app, words, context, common);
  context.command = take_command(app, words);
  split_empty_values(words);
  auto refusals = take_refusals(words);
  if (!refusals) return report_error(context, refusals.error());
  context.refusals = std::move(*refusals);
  // Also for what is wrong with the others.
  if (std::find(words.begin(), words.end(), "--log-json") != words.end()) terminal.begin_log();
  std::reverse(words.begin(), words.end());  // as CLI11 wants them
  const Configuration configuration = read_configuration(app);
  ConfiguredDefaults defaults(app, configuration.values);
  try {
    app.parse(std::vector<std::string>(words));
  } catch (const CLI::ParseError& error) {
    const bool is_help = dynamic_cast<const CLI::CallForHelp*>(&error) != nullptr;
    if (is_help && app.get_subcommands().empty() && !what_is_unknown(app, nullptr).empty())
      return report_error(context, usage_error(app, error));  // `stasis help dmup`
    if (error.get_exit_code() == 0) return print_asked(app, context, error, wants_json(argc, argv));
    context.json = wants_json(argc, argv);
    auto of_a_file = configuration_error(app, defaults, configuration, std::move(words), error);
    return report_error(context, of_a_file ? *of_a_file : usage_error(app, error));
  }
  context.configured = defaults.supplied();
  if (common.log_json) terminal.begin_log();  // also by a file
  terminal.set_quiet(common.quiet || (context.json && !common.log_json));
  terminal.set_verbose(context.verbose);
  for (const ConfigFile& file : configuration.files) {
    if (!file.why_not.empty())
      context.note(fmt::format("{} is not read: {}", file.path, file.why_not));
  }
  if (configuration.error && !app.get_subcommand("config")->parsed())
    return report_error(context, *configuration.error);
  if (auto possible = check_fault_setting(); !possible)
    return report_error(context, possible.error());
  const auto asked = std::find_if(verbs.begin(), verbs.end(),
                                  [](const Verb& verb) { return verb.command->parsed(); });
  return asked == verbs.end() ? exit_status(ErrorCode::kInternal) : run_verb(*asked, context);
}

// No function of ours throws; this is memory or threads that were not to be had, or a bug.
int report_exception(int argc, char** argv, const std::exception& exception) {
  Terminal terminal;
  Interrupt interrupt;
  Context context{terminal, interrupt, wants_json(argc, argv)};
  const bool memory = dynamic_cast<const std::bad_alloc*>(&exception) != nullptr;
  return report_error(
      context, {memory ? ErrorCode::kOutOfHostMemory : ErrorCode::kInternal,
                fmt::format("stasis was stopped by an exception: {}", exception.what()),
                "`stasis ps` shows what was left behind, and `stasis recover` mends it; if memory "
                "and threads are not limited (ulimit), this is a bug to report"});
}

// Part of a job, and no verb: reads no options and loads nothing. The exit status.
int hold_terminal(const std::vector<std::string>& words) {
  auto order = job::parse_holder_order(words);
  if (!order) {
    print_error(fmt::format("{} is not for people", job::kHoldTerminal));
    return exit_status(ErrorCode::kUsage);
  }
  const job::Outcome outcome = job::hold_terminal(std::move(*order));
  if (outcome.why) print_error(outcome.why->to_string());
  return outcome.status;
}

// What would be opened there could be taken for a terminal: an image's file, at worst. A write
// fails, as on a closed descriptor.
void fill_standard_descriptors(Inherited& inherited) {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    bool& closed = inherited.closed.at(static_cast<std::size_t>(fd));
    closed = ::fcntl(fd, F_GETFD) < 0;
    if (closed) (void)::open("/dev/null", O_RDONLY);
  }
}

}  // namespace
}  // namespace stasis::cli

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == stasis::job::kHoldTerminal)
    return stasis::cli::hold_terminal({argv + 2, argv + argc});
  stasis::cli::Inherited inherited;
  stasis::cli::fill_standard_descriptors(inherited);
  // Ignored, as some daemons leave it, the kernel would collect our children before we do.
  inherited.ignored_children = std::signal(SIGCHLD, SIG_DFL) == SIG_IGN;
  try {
    return stasis::cli::run(argc, argv, inherited);
  } catch (const std::exception& exception) {
    const int status = stasis::cli::report_exception(argc, argv, exception);
    ::_exit(status);  // threads of ours may still be at the driver
  }
}
