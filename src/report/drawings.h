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

// One after the other, as the phases of an operation are.
struct TimedPhase {
  std::string name;  // shortened
  double start = 0;  // seconds
  double seconds = 0;
};
std::vector<TimedPhase> timed_phases(const std::vector<PhaseRecord>& phases);

// At most this many bars; the table beside them shows the rest.
inline constexpr std::size_t kMostDrawn = 40;

// A list of two, {wide, narrow}; empty if there is nothing to draw.
data draw_timeline(const std::vector<TimedPhase>& phases);

}  // namespace stasis::report
