#include "report/drawings.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include "base/printable.h"
#include "base/units.h"
#include "report/treemap.h"

namespace stasis::report {
namespace {

using kainjow::mustache::list;

// A number for an attribute of SVG.
std::string number(double value) { return fmt::format("{:.2f}", value); }
std::string percent(double share) { return fmt::format("{:.4f}%", 100 * share); }

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

// ---- The treemap

struct TreemapShape {
  const char* name;
  double width;      // that the tiles are laid out for
  double height;     // pixels
  double narrowest;  // in pixels, at which it is shown
  double roomy;      // from which on page.css shows the labels that are marked so
};
constexpr TreemapShape kTreemaps[] = {{"wide", 1000, 300, 620, 980},
                                      {"narrow", 340, 340, 300, 300}};

// What text takes at most: 13 pixels in bold, in the widest of the usual fonts.
double text_width(std::string_view text) { return 8.2 * static_cast<double>(text.size()) + 20; }

// The same in fewer words, where they are our own.
std::string short_name(const ImagePart& part) {
  constexpr std::string_view kMemoryOf = "memory of ";
  if (part.kind == ImagePart::Kind::kProcessMemory && part.what.starts_with(kMemoryOf))
    return part.what.substr(kMemoryOf.size());
  constexpr std::string_view kContentOf = "GPU content of ";
  if (part.kind == ImagePart::Kind::kGpuContent && part.what.starts_with(kContentOf))
    return "GPU of " + part.what.substr(kContentOf.size());
  if (part.kind == ImagePart::Kind::kDeletedFiles) return "deleted";
  if (part.kind == ImagePart::Kind::kUnknownMemory) return "memory";
  return part.what;
}

constexpr double kLine = 20;
constexpr double kFirstLine = 22;

data label(const std::string& text, const char* kind, double y) {
  data out;
  out.set("text", text);
  out.set("class", kind);
  out.set("y", number(y));
  return out;
}

// The name and the size of a part, as far as its tile has room for them: always, or only where the
// page is wide ("roomy"), or only where it is not ("tight").
list labels_of(const ImagePart& part, const Tile& place, const TreemapShape& shape) {
  const double share = place.width / shape.width;
  const auto fits = [&](const std::string& text) {
    return text_width(text) <= share * shape.narrowest;
  };
  const auto fits_wide = [&](const std::string& text) {
    return text_width(text) <= share * shape.roomy;
  };
  const std::string size = format_bytes(part.bytes);
  const std::string brief = short_name(part);
  list out;
  if (place.height < kFirstLine + 6 || !fits_wide(size)) return out;
  const bool two_lines = place.height >= kFirstLine + kLine + 6;
  const bool always = two_lines && (fits(part.what) || fits(brief));
  if (two_lines) {
    // A name that is not always there comes second, and leaves no gap.
    const double y = always ? kFirstLine : kFirstLine + kLine;
    if (fits(part.what)) {
      out.push_back(label(part.what, "name", y));
    } else {
      const bool only_wide = !fits(brief);
      if (fits_wide(part.what)) {
        out.push_back(label(part.what, "name roomy", y));
        if (!only_wide) out.push_back(label(brief, "name tight", y));
      } else if (fits_wide(brief)) {
        out.push_back(label(brief, only_wide ? "name roomy" : "name", y));
      }
    }
  }
  out.push_back(
      label(size, fits(size) ? "size" : "size roomy", always ? kFirstLine + kLine : kFirstLine));
  return out;
}

std::string part_colour(const ImagePart& part, std::size_t& processes) {
  switch (part.kind) {
    case ImagePart::Kind::kProcessMemory:
    case ImagePart::Kind::kGpuContent:
      return fmt::format("t-process{}", processes++ % 3);
    case ImagePart::Kind::kSharedMemory:
      return "t-shared";
    case ImagePart::Kind::kUnknownMemory:
      return "t-unknown";
    case ImagePart::Kind::kDeletedFiles:
      return "t-deleted";
    case ImagePart::Kind::kElse:
      break;
  }
  return "t-else";
}

data one_treemap(const std::vector<ImagePart>& parts, double total, const TreemapShape& shape) {
  std::vector<std::uint64_t> amounts;
  for (const ImagePart& part : parts)
    amounts.push_back(part.bytes);
  const std::vector<Tile> places = lay_out_treemap(amounts, shape.width, shape.height);
  list tiles;
  std::size_t processes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Tile& place = places[i];
    const std::string size = format_bytes(parts[i].bytes);
    const double share_of_width = place.width / shape.width;
    data tile;
    tile.set("x", percent(share_of_width > 0 ? place.x / shape.width : 0));
    tile.set("width", percent(share_of_width));
    tile.set("y", number(place.y));
    tile.set("height", number(place.height));
    tile.set("colour", part_colour(parts[i], processes));
    tile.set("labels", data(labels_of(parts[i], place, shape)));
    tile.set("details", fmt::format("{}: {}, {}", parts[i].what, size,
                                    percent_text(static_cast<double>(parts[i].bytes), total)));
    tiles.push_back(tile);
  }
  data out;
  out.set("shape", shape.name);
  out.set("height", number(shape.height + kTipHeight));
  out.set("tip_y", number(shape.height + kTipHeight - 8));
  out.set("tiles", tiles);
  return out;
}

}  // namespace

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

data draw_treemap(const std::vector<ImagePart>& parts) {
  std::vector<ImagePart> drawn;
  double total = 0;
  ImagePart rest;
  std::size_t rest_count = 0;
  for (const ImagePart& part : parts) {
    if (part.bytes == 0) continue;
    total += static_cast<double>(part.bytes);
    if (drawn.size() + 1 < kMostDrawn) {
      drawn.push_back({part.kind, shortened(part.what, 60), part.bytes});
    } else {
      rest.bytes += part.bytes;
      ++rest_count;
    }
  }
  if (rest_count > 0) {
    rest.what = fmt::format("{} smaller parts", rest_count);
    drawn.push_back(rest);
  }
  std::stable_sort(drawn.begin(), drawn.end(),
                   [](const ImagePart& a, const ImagePart& b) { return a.bytes > b.bytes; });
  list out;
  if (!drawn.empty()) {
    for (const TreemapShape& shape : kTreemaps)
      out.push_back(one_treemap(drawn, total, shape));
  }
  return data(out);
}

}  // namespace stasis::report
