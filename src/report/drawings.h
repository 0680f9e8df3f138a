// The page's two drawings as numbers for its template: where each bar of the timeline and each tile
// of the treemap stands. Lengths along the page are in percent, so that the browser fits them to
// any width while text keeps its size; each drawing is there twice, for wide and for narrow pages,
// and page.css shows one. Not for use outside this folder.
#pragma once

#include <string>
#include <vector>

#include <kainjow/mustache.hpp>

#include "operations/operations.h"

namespace stasis::report {

using kainjow::mustache::data;

// "61.3 %", "< 0.1 %".
std::string percent_text(double part, double whole);

// One after the other, as the phases of an operation are.
struct TimedPhase {
  std::string name;  // shortened
  double start = 0;  // seconds
  double seconds = 0;
};
std::vector<TimedPhase> timed_phases(const std::vector<PhaseRecord>& phases);

// At most this many bars and tiles; the tables beside them show the rest.
inline constexpr std::size_t kMostDrawn = 40;

// Lists of two, {wide, narrow}; empty if there is nothing to draw.
data draw_timeline(const std::vector<TimedPhase>& phases);
data draw_treemap(const std::vector<ImagePart>& parts);

}  // namespace stasis::report
