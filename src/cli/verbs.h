// The verbs of `stasis`, one file each. A verb adds its subcommand and options to the command line
// and returns what to run when it is chosen.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "base/result.h"
#include "cli/terminal.h"
#include "driver/bounded_driver.h"
#include "operations/operations.h"
#include "operations/session.h"
#include "report/metrics.h"
#include "report/report.h"

namespace stasis::cli {

// Of what --json prints (docs/schema): another one if a key goes, or means something else.
inline constexpr int kSchemaVersion = 1;

// What main() has changed of this process, for the program that takes its place.
struct Inherited {
  std::array<bool, 3> closed = {};  // standard streams
  bool ignored_children = false;    // SIGCHLD
};

// What main() gives to every verb.
struct Context {
  Terminal& terminal;
  Interrupt& interrupt;
  bool json = false;
  int verbose = 0;
  // What an operation had to say besides, for --json, which prints no notes.
  std::vector<std::string> notes = {};
  // Of `stasis run`: COMMAND, as it was given.
  std::vector<std::string> command = {};
  // Options that have their values from a configuration file.
  std::set<std::string> configured = {};
  Inherited inherited = {};
  // Where errors go, as JSON: to a program that has started this one and wants to know what it
  // refuses, as the Python package does. Closed where a command begins.
  UniqueFd refusals = {};
  // The directory of the metrics; empty: none. Open from before the verb begins.
  std::string metrics = {};
  UniqueFd metrics_dir = {};
  std::optional<OperationFigures> figures = {};
  bool is_measured = false;
  // Where to write the trace; empty: nowhere.
  std::string trace = {};
  // The traces of processes that worked for this one, each as trace_of_process() gives it.
  std::vector<nlohmann::json> traces_of_helpers = {};
  OperationSession session{interrupt, terminal, [this](const std::string& text) { note(text); }};

  // The session's, and says so if it is the simulated one. While this process has one thread.
  using Movers = OperationSession::Movers;
  Result<std::unique_ptr<Driver>> load_driver(Movers movers);
  Environment environment(Driver& driver) { return session.environment(driver); }
  // To people, and for --json.
  void note(const std::string& text);
  // Writes the trace, once; says so if it cannot. Nothing without --trace.
  void end_trace(const std::string& verb);
  // kUsage if there is no such directory.
  Result<void> begin_metrics();
  // Adds the verb to the metrics and to the log, once; says so if it cannot. Nothing without
  // --metrics and --log-json. `error` is null where the verb succeeded.
  void end_measures(const std::string& verb, const Error* error);
  void log_figures() const;
  // The result, with --json.
  void print(nlohmann::json object) const;
};

// An exit status, or an error that main() prints and turns into one.
using RunVerb = std::function<Result<int>(Context&)>;

struct Verb {
  CLI::App* command = nullptr;
  RunVerb run;
  bool acts = true;           // on processes; a verb that only probes may be ended like any program
  bool bounds_driver = acts;  // knows --driver-timeout
  bool measures = acts;       // knows --trace and --metrics
  bool moves = acts;          // knows --ring
};

Verb add_run(CLI::App& app);
// Takes COMMAND and its arguments out of the words of a `stasis run`, before they are parsed, and
// leaves one in their place: CLI11 would make two words of "[1,2]", and none of "[]".
std::vector<std::string> take_command(const CLI::App& app, std::vector<std::string>& words);
// The descriptor of --refusal-fd, also where other words are wrong; none if it is not given.
Result<UniqueFd> take_refusals(const std::vector<std::string>& words);
Verb add_attach(CLI::App& app);
Verb add_ps(CLI::App& app);
Verb add_suspend(CLI::App& app);
Verb add_resume(CLI::App& app);
Verb add_swap(CLI::App& app);
Verb add_dump(CLI::App& app);
Verb add_restore(CLI::App& app);
Verb add_recover(CLI::App& app);
Verb add_doctor(CLI::App& app);
Verb add_explain(CLI::App& app);
Verb add_inspect(CLI::App& app);
Verb add_logs(CLI::App& app);
Verb add_verify(CLI::App& app);
Verb add_report(CLI::App& app);
Verb add_config(CLI::App& app);

// A whole number and one of `units`, as CLI11 reads them; nothing for anything else. CLI11 alone
// takes "-1" for a large number, "010" for 8 and "m" for 1m.
std::optional<std::uint64_t> number_with_unit(std::string text, const CLI::AsNumberWithUnit& units);
// A duration, "90s", "10m", "2h", "500ms"; a number without a unit gets `unit_if_none`. Nothing for
// anything else, or for more than 49 days.
std::optional<std::chrono::milliseconds> duration_of(const std::string& text,
                                                     const std::string& unit_if_none);
// An option for one.
CLI::Option* add_duration(CLI::App& command, const std::string& name,
                          const std::string& unit_if_none,
                          std::function<void(std::chrono::milliseconds)> take,
                          const std::string& description);

// Options that several verbs have.
// How long to wait for GPU work, before the first process is checkpointed.
void add_timeout(CLI::App& command, std::chrono::milliseconds& timeout);
// Whether the driver or the mover moves GPU memory.
void add_path(CLI::App& command, MemoryPath& path);
// Whether the agent is brought to programs first that run without it, and how.
struct AttachFirst {
  bool wanted = false;
  AttachWay way;
  // Nothing if it is not wanted. Before this process goes where the target is. kUsage with a path
  // that leaves agents alone; kIo without the agent's file.
  Result<std::optional<AttachWay>> open(MemoryPath path) const;
};
void add_attach_first(CLI::App& command, AttachFirst& first);
// How much host memory the mover copies through, where the command line does not say: kUsage for
// what no ring can be.
Result<std::uint64_t> ring_of_environment();
// The option.
CLI::Option* add_ring(CLI::App& command, std::uint64_t& bytes);
// How long the driver may be silent.
void add_driver_timeout(CLI::App& command, std::optional<DriverTimeouts>& timeouts);
// Where to add what the verb took.
CLI::Option* add_metrics_option(CLI::App& command, std::string& directory);
// Where to write the trace of the verb.
void add_trace(CLI::App& command, std::string& path);
// How long the whole verb may take.
void add_time_limit(CLI::App& command, std::chrono::milliseconds& limit, const std::string& after);
void add_device_map(CLI::App& command, std::optional<std::string>& text);
void add_criu_path(CLI::App& command, std::optional<std::string>& path);
// "DIR,-D,--images-dir" of the verbs that read an image, and what it means for them: a job's
// directory stands for the newest image in it, which a note says then.
inline constexpr const char* kImageHelp =
    "directory of the image, or of a job's images, of which the newest is meant";
void find_image(Context& context, std::string& images_dir);
// Whether every byte of an image is read.
void add_verify_flag(CLI::App& command, bool& verify);

// What is in an image, and whether it can be restored here; `device_map` as from the command line.
Result<ImageReport> inspect_image(Context& context, InspectOptions& options,
                                  const std::optional<std::string>& device_map);
// The exit status for the first reason why it cannot be restored here, or 0.
int status_of(const ImageReport& report);

// The result of a command that ends with that status: as JSON, for people, or in the log, as asked.
void tell_error(const Context& context, const Error& error, int status);

// Reports as text; as JSON: report/report.h.
// What its processes are now: "it runs on", "process 12 is running, process 13 is checkpointed".
// `target`: its number or name, as a later line of the user may have it.
std::string state_text(const Report& report, const std::string& target);
// "direct path: move out 12 ms, lock 3 ms"
std::string phases_text(const Report& report);
// ", standing still for 0.52 s", or nothing.
std::string downtime_text(const Report& report);

// For an operation: SIGINT, SIGTERM, SIGHUP and SIGQUIT ask `interrupt` to stop; what else would
// end or stop this process in the middle is ignored, Ctrl-Z with a note.
void install_signal_handlers(Interrupt& interrupt, const Terminal& terminal);

// From now on what this process gets is passed on to the restored root, its child.
void pass_signals_on_to(Pid root);
// Waits for the restored root, passing on the signals that this process gets, also one that came
// too late to stop the restore, and those that an operation ignores besides. Ctrl-Z stops this
// process again. Returns the root's exit status as a shell would give it (128 + signal).
Result<int> attend(Pid root);
// The same in a program that is started anew in this process; returns only if that fails.
void attend_afresh(Pid root);
Verb add_attend(CLI::App& app);

// For tests of the fault points; not for people.
Verb add_list_fault_points(CLI::App& app);
// Hidden: all verbs and options as JSON, from which man pages and completions are made.
Verb add_describe(CLI::App& app);

}  // namespace stasis::cli
