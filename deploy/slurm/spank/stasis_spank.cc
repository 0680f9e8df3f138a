// SPDX-License-Identifier: GPL-2.0-or-later
//
// A plugin for Slurm: sbatch, srun and salloc get --stasis-images=DIR, --stasis-every=TIME and
// --stasis-grace=TIME. Each task of a step then runs as `stasis-task -- COMMAND`, with these in its
// environment; the batch script itself only gets the environment. deploy/slurm/README.md.
//
// One file, and nothing but Slurm's header, because Slurm loads a plugin only if it was compiled
// for its own version:
//
//   g++ -std=c++17 -shared -fPIC -o stasis.so stasis_spank.cc
//
// Words on a line of plugstack.conf: task=PATH, where stasis-task is [/usr/bin/stasis-task].
extern "C" {
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>
}

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace {

// Slurm's numbers for what is no step of srun's: the batch script, and what it keeps for itself.
constexpr std::uint32_t kMostStepId = 0xfffffff0;
constexpr std::string_view kNone = "none";

struct Setting {
  const char* option;
  const char* variable;
  std::string value;
};

std::array<Setting, 4> settings = {{{"stasis-images", "STASIS_IMAGES", {}},
                                    {"stasis-every", "STASIS_EVERY", {}},
                                    {"stasis-grace", "STASIS_GRACE", {}},
                                    {"stasis-together", "STASIS_TOGETHER", {}}}};
constexpr int kTogether = 3;  // of these, the one without a value
std::string task_program = "/usr/bin/stasis-task";

const std::string& images() { return settings[0].value; }

bool is_duration(std::string_view text) {
  const auto digits = text.find_first_not_of("0123456789");
  if (digits == 0 || text.find_first_not_of('0') >= digits) return false;
  const std::string_view unit = digits == std::string_view::npos ? "" : text.substr(digits);
  return unit.empty() || unit == "ms" || unit == "s" || unit == "m" || unit == "h";
}

// What stasis-task replaces.
bool is_pattern(std::string_view text) {
  for (auto at = text.find('%'); at != std::string_view::npos; at = text.find('%', at + 2)) {
    if (at + 1 == text.size() ||
        std::string_view("jAat%").find(text[at + 1]) == std::string_view::npos)
      return false;
  }
  return !text.empty();
}

// Here, so that sbatch refuses what would only fail on the node, hours later.
int take_option(int index, const char* value, int /*remote*/) {
  Setting& setting = settings.at(static_cast<std::size_t>(index));
  if (index == kTogether) {
    setting.value = "yes";
    return 0;
  }
  const std::string text = value ? value : "";
  const bool good = index == 0 ? is_pattern(text) : is_duration(text);
  if (!good) {
    slurm_error("--%s=%s: %s", setting.option, text.c_str(),
                index == 0 ? "must be a directory; %j, %A, %a, %t and %% are replaced in it"
                           : "must be a duration, as 90s, 10m or 2h");
    return -1;
  }
  setting.value = text;
  return 0;
}

// Whether srun was told to start different programs: where it can't be done, it is refused.
[[maybe_unused]] bool has_several_programs() {
  std::ifstream file("/proc/self/cmdline");
  const std::string line((std::istreambuf_iterator<char>(file)), {});
  return ('\0' + line).find(std::string("\0--multi-prog", 13)) != std::string::npos;
}

// The task becomes stasis-task, which then becomes `stasis run`.
bool wrap(spank_t spank) {
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 11, 0)
  std::array<const char*, 2> words = {task_program.c_str(), "--"};
  return spank_prepend_task_argv(spank, static_cast<int>(words.size()), words.data()) ==
         ESPANK_SUCCESS;
#else
  // There is no call for it yet. This is the task's own process, and the list is what it executes
  // next; Slurm's manual asks to leave it alone, and spank_prepend_task_argv() came for this.
  int count = 0;
  char** words = nullptr;
  if (spank_get_item(spank, S_JOB_ARGV, &count, &words) != ESPANK_SUCCESS || count < 1)
    return false;
  if (spank_setenv(spank, "STASIS_PROGRAM", words[0], 1) != ESPANK_SUCCESS) return false;
  words[0] = task_program.data();
  return true;
#endif
}

std::array<spank_option, 4> make_options() {
  static std::array<std::array<char, 128>, 4> usage = {
      {{"save the tasks to DIR and go on from there; %j job, %A array, %a its task, %t rank"},
       {"save them so often (e.g. 10m)"},
       {"how long a save before the end may take (e.g. 60s)"},
       {"the tasks hear of each other: start, save and restore them together"}}};
  static std::array<std::array<char, 8>, 2> words = {{{"DIR"}, {"TIME"}}};
  std::array<spank_option, 4> options{};
  for (std::size_t i = 0; i < options.size(); ++i) {
    options[i].name = const_cast<char*>(settings[i].option);
    const bool has_value = i != kTogether;
    if (has_value) options[i].arginfo = words[i == 0 ? 0 : 1].data();
    options[i].usage = usage[i].data();
    options[i].has_arg = has_value ? 1 : 0;
    options[i].val = static_cast<int>(i);
    options[i].cb = take_option;
  }
  return options;
}

}  // namespace

extern "C" {

extern const char plugin_name[];
extern const char plugin_type[];
extern const unsigned int plugin_version;
extern const unsigned int spank_plugin_version;
SPANK_PLUGIN(stasis, 1)

int slurm_spank_init(spank_t spank, int count, char* words[]) {
  for (int i = 0; i < count; ++i) {
    if (std::strncmp(words[i], "task=/", 6) != 0) {
      slurm_error("stasis: '%s' in plugstack.conf: there is only task=PATH", words[i]);
      return -1;
    }
    task_program = words[i] + 5;
  }
  static std::array<spank_option, 4> options = make_options();
  for (spank_option& option : options) {
    if (spank_option_register(spank, &option) != ESPANK_SUCCESS) return -1;
  }
  return 0;
}

int slurm_spank_init_post_opt(spank_t, int, char*[]) {
  // With sbatch and salloc they may come later, by srun's own line.
  if (spank_context() != S_CTX_LOCAL) return 0;
  const auto is_given = [](const Setting& setting) { return !setting.value.empty(); };
  if (images().empty() && std::any_of(settings.begin(), settings.end(), is_given)) {
    slurm_error("--stasis-every, --stasis-grace and --stasis-together need --stasis-images=DIR");
    return -1;
  }
#if SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(23, 11, 0)
  if (!images().empty() && images() != kNone && has_several_programs()) {
    slurm_error(
        "--stasis-images and --multi-prog do not go together before Slurm 23.11: write "
        "stasis-task in front of each program, and --stasis-images=none");
    return -1;
  }
#endif
  return 0;
}

// In the task's own process, as the job's user, just before it executes the program.
int slurm_spank_task_init(spank_t spank, int, char*[]) {
  if (images().empty() || images() == kNone) return 0;
  for (const Setting& setting : settings) {
    if (!setting.value.empty() &&
        spank_setenv(spank, setting.variable, setting.value.c_str(), 1) != ESPANK_SUCCESS)
      return -1;
  }
  std::uint32_t step = 0;
  if (spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS) return -1;
  if (step >= kMostStepId) return 0;
  if (wrap(spank)) return 0;
  slurm_error("stasis: the task can't be started by %s", task_program.c_str());
  return -1;
}

}  // extern "C"
