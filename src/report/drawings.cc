#include "report/drawings.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include "base/printable.h"
#include "base/units.h"

namespace stasis::report {
namespace {

using kainjow::mustache::list;

// A number for an attribute of SVG.
std::string number(double value) { return fmt::format("{:.2f}", value); }

// ---- The timeline

struct TimelineShape {
  const char* name;
  bool name_above;     // its name stands above a bar, or at its left
  double track_x;      // of the width: where time 0 is
  double track_width;  // of the width
  double row_height;   // pixels, as all below
  double text_y;
  double bar_y;
  double bar_height;
  int most_ticks;
};
constexpr TimelineShape kTimelines[] = {{"wide", false, 0.16, 0.66, 34, 22, 8, 18, 6},
                                        {"narrow", true, 0, 1, 46, 15, 22, 16, 3}};
constexpr double kAxisHeight = 28;
// Below a drawing: the line that tells of what is pointed at.
constexpr double kTipHeight = 30;

// 1, 2 or 5 times a power of ten, so that at most `most` steps make up `total`.
double tick_step(double total, int most) {
  const double rough = total / most;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough) return factor * power;
  return 10 * power;
}

list ticks(double total, const TimelineShape& shape) {
  list out;
  if (total <= 0) return out;
  const double step = tick_step(total, shape.most_ticks);
  for (int i = 0; i * step <= total; ++i) {
    data tick;
    tick.set("x", percent(i * step / total));
    tick.set("label", i == 0 ? "0" : format_seconds(Seconds(i * step)));
    // In the middle of its line, unless it would stand out at an end.
    tick.set("anchor", i == 0 ? "start" : i * step > 0.95 * total ? "end" : "middle");
    out.push_back(tick);
  }
  return out;
}

const char* phase_colour(std::string_view name) {
  if (name == "lock" || name == "unlock" || name == "close") return "c-lock";
  if (name == "checkpoint" || name == "restore" || name == "copy out") return "c-driver";
  if (name == "criu") return "c-criu";
  return "c-other";
}

data one_timeline(const std::vector<TimedPhase>& phases, double total, const TimelineShape& shape) {
  list rows;
  double y = kAxisHeight;
  for (const TimedPhase& phase : phases) {
    if (rows.size() == kMostDrawn) break;
    const std::string share = percent_text(phase.seconds, total);
    const std::string duration = format_seconds(Seconds(phase.seconds));
    data row;
    row.set("name", shortened(phase.name, 18));
    row.set("value", fmt::format("{}, {}", duration, share));
    row.set("details", fmt::format("{}: {}, {} of the time, begins at {}", phase.name, duration,
                                   share, format_seconds(Seconds(phase.start))));
    row.set("tip", fmt::format("{}: {}, {}, from {} on", shortened(phase.name, 18), duration, share,
                               format_seconds(Seconds(phase.start))));
    row.set("colour", phase_colour(phase.name));
    row.set("start", percent(total > 0 ? phase.start / total : 0));
    row.set("width", percent(total > 0 ? phase.seconds / total : 0));
    row.set("row_y", number(y));
    row.set("text_y", number(y + shape.text_y));
    row.set("bar_y", number(y + shape.bar_y));
    rows.push_back(row);
    y += shape.row_height;
  }
  data out;
  out.set("shape", shape.name);
  out.set("height", number(y + kTipHeight));
  out.set("tip_y", number(y + kTipHeight - 8));
  out.set("axis_height", number(y - kAxisHeight + 6));
  out.set("track_x", percent(shape.track_x));
  out.set("track_width", percent(shape.track_width));
  out.set("row_height", number(shape.row_height));
  out.set("bar_height", number(shape.bar_height));
  out.set("ticks", ticks(total, shape));
  out.set("rows", rows);
  return out;
}

}  // namespace

std::string percent(double share) { return fmt::format("{:.4f}%", 100 * share); }

std::string percent_text(double part, double whole) {
  if (whole <= 0 || part <= 0) return "0 %";
  const double share = 100 * part / whole;
  if (share < 0.1) return "< 0.1 %";
  // 99.97 % is not all of it.
  return fmt::format("{:.1f} %", part < whole ? std::min(share, 99.9) : share);
}

std::vector<TimedPhase> timed_phases(const std::vector<PhaseRecord>& phases) {
  std::vector<TimedPhase> out;
  double start = 0;
  for (const PhaseRecord& phase : phases) {
    out.push_back({shortened(phase.name, 60), start, phase.seconds});
    start += phase.seconds;
  }
  return out;
}

data draw_timeline(const std::vector<TimedPhase>& phases) {
  list out;
  if (!phases.empty()) {
    const double total = phases.back().start + phases.back().seconds;
    for (const TimelineShape& shape : kTimelines) {
      data drawing = one_timeline(phases, total, shape);
      drawing.set("name_above", shape.name_above);
      out.push_back(drawing);
    }
  }
  return data(out);
}

}  // namespace stasis::report
