// conformance: the same program against the simulated and the real driver.
//
//   conformance --list                 the cases and what each proves
//   conformance --run [CASE...]        one line of JSON per case, on standard output
//   conformance --compare A B          a table of what differs between two runs; 1 if anything does
//   conformance --check RUN            runs the cases of a recorded run here, and compares
//
// Which driver it meets is decided by the dynamic loader (LD_LIBRARY_PATH). Each case runs in a
// process of its own with a time limit, so one that hangs or crashes says so and the rest go on.
// docs/simulated-driver.md lists what the cases prove.
#include <dlfcn.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>

#include "api.h"
#include "report.h"
#include "target.h"

namespace stasis::conformance {

const Api& api() {
  static const Api loaded = [] {
    Api a;
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      std::fprintf(stderr, "conformance: %s\n", ::dlerror());
      std::exit(77);
    }
#define STASIS_CONFORMANCE_LOAD(name)                                            \
  a.name = reinterpret_cast<cuda::fn::name*>(::dlsym(library, #name));           \
  if (!a.name) {                                                                 \
    std::fprintf(stderr, "conformance: the driver has no function %s\n", #name); \
    std::exit(77);                                                               \
  }
    STASIS_CONFORMANCE_API(STASIS_CONFORMANCE_LOAD)
#undef STASIS_CONFORMANCE_LOAD
    a.simulated = ::dlsym(library, cuda::kSimulatedMarkerSymbol) != nullptr;
    return a;
  }();
  return loaded;
}

namespace {

constexpr int kCaseSeconds = 300;

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (const auto& part : {api_cases(), stream_cases(), checkpoint_cases(), sharing_cases()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

const Case* find_case(const std::vector<Case>& cases, const std::string& name) {
  const auto it =
      std::find_if(cases.begin(), cases.end(), [&](const Case& c) { return name == c.name; });
  return it == cases.end() ? nullptr : &*it;
}

int run_here(const std::string& name) {
  const auto cases = all_cases();
  const auto* c = find_case(cases, name);
  if (!c) return 2;
  Report report(c->name);
  c->run(report);
  std::cout << report.line() << std::endl;
  ::_exit(0);  // threads of a case may be stuck in the driver on purpose
}

// The line of a case that was run in a process of its own.
std::string run_apart(const std::string& name) {
  int ends[2];
  if (::pipe(ends) != 0) std::abort();
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setpgid(0, 0);
    ::dup2(ends[1], 1);
    ::close(ends[0]);
    ::close(ends[1]);
    ::execl("/proc/self/exe", "conformance", "--case", name.c_str(), nullptr);
    ::_exit(127);
  }
  ::close(ends[1]);
  std::string text;
  char buffer[4096];
  pollfd p{ends[0], POLLIN, 0};
  bool in_time = true;
  for (;;) {
    in_time = ::poll(&p, 1, kCaseSeconds * 1000) > 0;
    if (!in_time) break;
    const auto n = ::read(ends[0], buffer, sizeof buffer);
    if (n <= 0) break;
    text.append(buffer, static_cast<std::size_t>(n));
    if (text.back() == '\n') break;
  }
  ::kill(-pid, SIGKILL);  // with its targets
  int status = 0;
  ::waitpid(pid, &status, 0);
  ::close(ends[0]);
  if (!text.empty() && text.back() == '\n') return text.substr(0, text.size() - 1);
  Report report(name);
  report.yes_no(in_time ? "crashed" : "hung", true);
  return report.line();
}

int run(const std::vector<std::string>& wanted) {
  const auto cases = all_cases();
  for (const auto& name : wanted) {
    if (find_case(cases, name)) continue;
    std::fprintf(stderr, "conformance: no case '%s'; --list names them\n", name.c_str());
    return 2;
  }
  std::fprintf(stderr, "conformance: %s driver\n", api().simulated ? "simulated" : "real");
  for (const auto& c : cases) {
    const bool chosen =
        wanted.empty() || std::find(wanted.begin(), wanted.end(), c.name) != wanted.end();
    if (chosen) std::cout << run_apart(c.name) << std::endl;
  }
  return 0;
}

bool read_run(const char* path, std::vector<Line>& out) {
  std::ifstream file(path);
  if (!file) {
    std::fprintf(stderr, "conformance: cannot read %s\n", path);
    return false;
  }
  std::string text;
  while (std::getline(file, text)) {
    Line line;
    if (text.empty()) continue;
    if (!parse_line(text, line)) {
      std::fprintf(stderr, "conformance: %s: not a line of a run: %s\n", path, text.c_str());
      return false;
    }
    out.push_back(line);
  }
  return true;
}

const Line* find_line(const std::vector<Line>& lines, const std::string& name) {
  for (const auto& line : lines) {
    if (line.name == name) return &line;
  }
  return nullptr;
}

long compare_case(const Line& a, const Line& b) {
  auto values = [](const Line& line, const std::string& key) {
    const auto it = line.values.find(key);
    return it == line.values.end() ? std::string("(none)") : it->second;
  };
  auto keys = a.values;
  keys.insert(b.values.begin(), b.values.end());
  long different = 0;
  for (const auto& [key, ignored] : keys) {
    if (values(a, key) == values(b, key)) continue;
    ++different;
    std::printf("DIFFERS  %-24s %-32s %-12s %s\n", a.name.c_str(), key.c_str(),
                values(a, key).c_str(), values(b, key).c_str());
  }
  if (!different) std::printf("same     %-24s %zu values\n", a.name.c_str(), keys.size());
  return different;
}

int compare(const char* first, const char* second) {
  std::vector<Line> a;
  std::vector<Line> b;
  if (!read_run(first, a) || !read_run(second, b)) return 2;
  long different = 0;
  long compared = 0;
  for (const auto& line : a) {
    const auto* other = find_line(b, line.name);
    if (!other) {
      std::printf("MISSING  %-24s only in %s\n", line.name.c_str(), first);
      ++different;
    } else if (!line.skipped.empty() || !other->skipped.empty()) {
      const auto& why = line.skipped.empty() ? other->skipped : line.skipped;
      std::printf("skipped  %-24s %s\n", line.name.c_str(), why.c_str());
    } else {
      different += compare_case(line, *other);
      ++compared;
    }
  }
  for (const auto& line : b) {
    if (find_line(a, line.name)) continue;
    std::printf("MISSING  %-24s only in %s\n", line.name.c_str(), second);
    ++different;
  }
  std::printf("%ld cases compared, %ld differences\n", compared, different);
  return different ? 1 : 0;
}

int check(const char* recorded) {
  std::vector<Line> lines;
  if (!read_run(recorded, lines)) return 2;
  const auto cases = all_cases();
  long different = 0;
  for (const auto& line : lines) {
    if (!line.skipped.empty()) continue;
    Line here;
    if (!find_case(cases, line.name)) {
      std::printf("MISSING  %-24s is no case any more\n", line.name.c_str());
      ++different;
    } else if (!parse_line(run_apart(line.name), here) || !here.skipped.empty()) {
      std::printf("SKIPPED  %-24s %s\n", line.name.c_str(), here.skipped.c_str());
      ++different;
    } else {
      different += compare_case(line, here);
    }
    std::fflush(stdout);
  }
  std::printf("%ld differences from %s\n", different, recorded);
  return different ? 1 : 0;
}

int list() {
  for (const auto& c : all_cases())
    std::printf("%-24s %s\n", c.name, c.about);
  return 0;
}

int usage(int status) {
  std::fprintf(
      status ? stderr : stdout,
      "usage: conformance --list | --run [CASE...] | --compare RUN RUN | --check RUN\n"
      "Runs CUDA driver cases and prints what was seen, one line of JSON each; compares two "
      "runs.\n");
  return status;
}

}  // namespace
}  // namespace stasis::conformance

int main(int argc, char** argv) {
  using namespace stasis::conformance;  // NOLINT(google-build-using-namespace)
  ::signal(SIGPIPE, SIG_IGN);
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) return usage(2);
  if (words[0] == "--target") return target_main();
  if (words[0] == "--case" && words.size() == 2) return run_here(words[1]);
  if (words[0] == "--list" && words.size() == 1) return list();
  if (words[0] == "--run") return run({words.begin() + 1, words.end()});
  if (words[0] == "--compare" && words.size() == 3) return compare(argv[2], argv[3]);
  if (words[0] == "--check" && words.size() == 2) return check(argv[2]);
  if (words[0] == "--help") return usage(0);
  return usage(2);
}
