#include "job/supervisor_texts.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include <fmt/format.h>

#include "job/signals.h"

namespace stasis::job {

std::string not_begun_text(int signal_number) {
  return fmt::format("{}: the job has not been started, and has lost nothing",
                     signal_name(signal_number));
}

std::string once_more_text(int signal_number, Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::seconds>(until - Clock::now());
  return fmt::format("{} once more: the save has {} s left; `kill -KILL {}` ends all without it",
                     signal_name(signal_number), std::max<std::int64_t>(left.count(), 0),
                     ::getpid());
}

std::string saved_text(const std::string& path, const Saved& saved, const std::vector<int>& removed,
                       bool to_its_end) {
  std::string text = fmt::format("saved to {} ({}) in {}", path, saved.size,
                                 format_seconds(Seconds(saved.seconds)));
  if (saved.downtime)
    text += fmt::format(", standing still for {}", format_seconds(Seconds(*saved.downtime)));
  if (!removed.empty()) text += "; removed";
  for (const int number : removed)
    text += fmt::format(" {:06}", number);
  if (to_its_end) text += "; the job has ended, to go on from there";
  return text;
}

std::string early_end_text(int signal_number, Seconds after) {
  return fmt::format(
      "the job was ended by {} within {} of its restore, and not by its own end, as by a `stasis "
      "dump` of it: otherwise something that it had when it was saved may not be here; its images "
      "stay",
      signal_name(signal_number), format_seconds(after));
}

}  // namespace stasis::job
