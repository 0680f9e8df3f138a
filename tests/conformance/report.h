// What one case has seen: named values in order, printed as one line of JSON.
//
// Only what must be equal on both drivers belongs here: result codes, states, whether something
// waits. No times, sizes or addresses. Threads: one thread at a time.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace stasis::conformance {

class Report {
 public:
  explicit Report(std::string name) : name_(std::move(name)) {}
  void note(const std::string& key, long value) { add(key, std::to_string(value)); }
  void yes_no(const std::string& key, bool value) { add(key, value ? "true" : "false"); }
  void skip(const std::string& reason) { skipped_ = reason; }
  std::string line() const;

 private:
  void add(const std::string& key, const std::string& value) { values_.emplace_back(key, value); }
  std::string name_;
  std::string skipped_;
  std::vector<std::pair<std::string, std::string>> values_;
};

// One line read back. False: not a line of ours.
struct Line {
  std::string name;
  std::string skipped;
  std::map<std::string, std::string> values;
};
bool parse_line(const std::string& text, Line& out);

struct Case {
  const char* name;
  const char* about;  // the row of docs/simulated-driver.md that it proves
  void (*run)(Report&);
};

std::vector<Case> api_cases();
std::vector<Case> stream_cases();
std::vector<Case> checkpoint_cases();
std::vector<Case> sharing_cases();

}  // namespace stasis::conformance
