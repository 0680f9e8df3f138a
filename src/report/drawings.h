// The page's timeline as numbers for its template: where each of its bars stands. Lengths along the
// page are in percent, so that the browser fits them to any width while text keeps its size; the
// timeline is there twice, for wide and for narrow pages, and page.css shows one. Not for use
// outside this folder.
#pragma once

#include <string>
#include <vector>

#include <kainjow/mustache.hpp>

#include "operations/operations.h"

namespace stasis::report {

using kainjow::mustache::data;

// For an attribute of SVG: "61.3000%".
std::string percent(double share);
// For people: "61.3 %", "< 0.1 %".
std::string percent_text(double part, double whole);

// The phases of an operation, one after the other, and what went on beside each other within them.
struct TimedPhase {
  std::string name;  // shortened
  double start = 0;  // seconds
  double seconds = 0;
  bool beside = false;
};
// What was beside stands behind the phase in which it began.
std::vector<TimedPhase> timed_phases(const std::vector<PhaseRecord>& phases,
                                     const std::vector<PhaseRecord>& beside);
// What happens in it, for people.
std::string meaning_of(const TimedPhase& phase);
// Until the last one ends.
double total_time(const std::vector<TimedPhase>& phases);

// At most this many bars; the table beside them shows the rest.
inline constexpr std::size_t kMostDrawn = 40;

// A list of two, {wide, narrow}; empty if there is nothing to draw.
data draw_timeline(const std::vector<TimedPhase>& phases);

}  // namespace stasis::report
