// How many threads of a process are parked, seen from outside: they wait in code that lies in no
// file, which no test program has of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "proc/procfs.h"

namespace stasis::fakes {

// A thread that is just on its way into the wait is not counted.
inline int count_parked_threads(Pid pid) {
  const auto mappings = proc::ProcFs().mappings(pid);
  if (!mappings) return 0;
  const auto in_a_lot = [&](std::uint64_t at) {
    return std::any_of(mappings->begin(), mappings->end(), [&](const proc::Mapping& mapping) {
      return mapping.path.empty() && mapping.permissions == "r-xp" && mapping.start <= at &&
             at < mapping.end;
    });
  };
  const auto threads = proc::ProcFs().threads(pid);
  return static_cast<int>(std::count_if(threads.begin(), threads.end(), [&](Tid thread) {
    // "202 0x7f.. 0x80 0x.. 0x0 0x.. 0x.. 0xSP 0xPC"
    std::ifstream file(fmt::format("/proc/{}/task/{}/syscall", pid.value, thread.value));
    std::vector<std::string> words;
    for (std::string word; file >> word;)
      words.push_back(std::move(word));
    return words.size() == 9 && in_a_lot(std::strtoull(words[8].c_str(), nullptr, 16));
  }));
}

}  // namespace stasis::fakes
