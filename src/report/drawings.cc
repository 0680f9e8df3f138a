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
    // In the middle of its line, unless it would stand out at an end: half of "200 ms" takes 21 of
    // the 270 pixels that the drawing has on the narrowest of telephones.
    tick.set("anchor", i == 0 ? "start" : i * step > 0.9 * total ? "end" : "middle");
    out.push_back(tick);
  }
  return out;
}

std::string phase_meaning(std::string_view name) {
  constexpr std::pair<std::string_view, std::string_view> kMeanings[] = {
      {"base", "the earlier image is read and verified, to which this one refers"},
      {"prepare", "memory is made ready for the content of the GPU; the processes still run"},
      {"zeros", "the GPU tells which of its memory is zeros, which is neither copied nor kept"},
      {"mover", "the mover process gets its contexts"},
      {"content", "what was copied is written to the image to its end, and gets its index"},
      {"host memory", "large host memory is written to the image, by all processors"},
      {"pre-copy", "large host memory is written to the image while the job runs"},
      {"GPU pre-copy", "GPU memory is written to the image while the job runs"},
      {"finish", "the image gets its name"},
      {"close", "GPU work in flight is waited for, and new work held back, by the agent"},
      {"hook", "the agent is brought into a process that runs without it"},
      {"watch", "it is watched for CUDA graphs"},
      {"find", "its GPU memory is found"},
      {"exchange", "its GPU memory becomes the agent’s, at the same addresses"},
      {"copy out",
       "the content of the GPU is copied past the driver: into the image, or into the processes’ "
       "own memory"},
      {"evict", "memory whose content was copied is given back to the GPU"},
      {"lock", "GPU work in flight is waited for, and new work held back"},
      {"checkpoint",
       "the driver moves the content of the GPU, or what is left of it, into the processes’ own "
       "memory"},
      {"criu start", "CRIU starts and finds out what the kernel can do; the processes still run"},
      {"criu",
       "CRIU writes the processes into files, and with them what they have of the GPU’s content"},
      {"checksums", "every file gets a checksum, by which a restore finds damage"},
      {"sync", "the files are brought to the disk, so that they survive a loss of power"}};
  for (const auto& [known, meaning] : kMeanings)
    if (name == known) return std::string(meaning);
  return "a step of another version of Stasis";
}

// Of what went on within phases, by its kind.
std::string work_meaning(std::string_view name) {
  constexpr std::pair<std::string_view, std::string_view> kMeanings[] = {
      {"driver: ", "beside: the driver, with the process of that number"},
      {"mover: ", "beside: the mover process"},
      {"agent: ", "beside: the agent in the process of that number"},
      {"criu: ", "beside: CRIU, until it comes to that point"},
      {"image: ", "beside: the writer of the image"}};
  for (const auto& [kind, meaning] : kMeanings)
    if (name.starts_with(kind)) return std::string(meaning);
  return "beside: a step of another version of Stasis";
}

// "driver: checkpoint 12" is the work of the driver.
bool is_of(std::string_view name, std::string_view kind) { return name.starts_with(kind); }

const char* phase_colour(std::string_view name) {
  if (is_of(name, "driver: ") || is_of(name, "mover: ")) return "c-driver";
  if (is_of(name, "criu: ")) return "c-criu";
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
    const auto colon = phase.beside ? phase.name.find(": ") : std::string::npos;
    row.set("name",
            shortened(colon == std::string::npos ? phase.name : phase.name.substr(colon + 2), 18));
    row.set("value", fmt::format("{}, {}", duration, share));
    row.set("details",
            fmt::format("{}{}: {}, {} of the time, begins at {}", phase.beside ? "beside: " : "",
                        phase.name, duration, share, format_seconds(Seconds(phase.start))));
    row.set("tip", fmt::format("{}: {}, {}, from {} on", shortened(phase.name, 24), duration, share,
                               format_seconds(Seconds(phase.start))));
    row.set("colour", phase_colour(phase.name) + std::string(phase.beside ? " beside" : ""));
    row.set("start", percent(total > 0 ? phase.start / total : 0));
    row.set("width", percent(total > 0 ? phase.seconds / total : 0));
    row.set("row_y", number(y));
    row.set("text_y", number(y + shape.text_y));
    // Thinner, in the middle of its line.
    const double thin = phase.beside ? shape.bar_height / 4 : 0;
    row.set("bar_y", number(y + shape.bar_y + thin));
    row.set("bar_height", number(shape.bar_height - 2 * thin));
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

std::string meaning_of(const TimedPhase& phase) {
  return phase.beside ? work_meaning(phase.name) : phase_meaning(phase.name);
}

std::vector<TimedPhase> timed_phases(const std::vector<PhaseRecord>& phases,
                                     const std::vector<PhaseRecord>& beside) {
  std::vector<TimedPhase> out;
  double end = 0;
  for (const PhaseRecord& phase : phases) {
    const double start = std::max(end, phase.begins.value_or(end));
    out.push_back({shortened(phase.name, 60), start, phase.seconds, false});
    end = start + phase.seconds;
  }
  for (const PhaseRecord& work : beside)
    out.push_back({shortened(work.name, 60), work.begins.value_or(0), work.seconds, true});
  std::stable_sort(out.begin(), out.end(),
                   [](const TimedPhase& a, const TimedPhase& b) { return a.start < b.start; });
  return out;
}

double total_time(const std::vector<TimedPhase>& phases) {
  double total = 0;
  for (const TimedPhase& phase : phases)
    total = std::max(total, phase.start + phase.seconds);
  return total;
}

data draw_timeline(const std::vector<TimedPhase>& phases) {
  list out;
  if (!phases.empty()) {
    const double total = total_time(phases);
    for (const TimelineShape& shape : kTimelines) {
      data drawing = one_timeline(phases, total, shape);
      drawing.set("name_above", shape.name_above);
      out.push_back(drawing);
    }
  }
  return data(out);
}

}  // namespace stasis::report
