// What a run of ours did when, for people who look for the time: `stasis VERB --trace FILE`.
//
// Off until trace_begin(), and then a Span costs two looks at the clock and a lock. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/units.h"

namespace stasis {

// The part of the program that a span is of; a row of its own is what "phases" get.
enum class TraceKind { kPhase, kDriver, kAgent, kMover, kCriu, kImage };
const char* trace_kind_name(TraceKind kind);

struct TraceEvent {
  TraceKind kind = TraceKind::kPhase;
  std::string name;
  Clock::time_point start;
  Clock::time_point end;
  int thread = 0;           // of ours
  Pid target;               // the process acted on; 0: none
  std::uint64_t bytes = 0;  // moved; 0: unknown
};

void trace_begin();
bool trace_is_on();
void trace_record(TraceEvent event);
// All of them until now, in the order in which they ended.
std::vector<TraceEvent> trace_events();

// While it lives, spans are noted whether or not a trace is on, the first kMost of them: for one
// who has to say what ran beside what.
class SpanNotes {
 public:
  static constexpr std::size_t kMost = 4096;
  SpanNotes();
  SpanNotes(const SpanNotes&) = delete;
  SpanNotes& operator=(const SpanNotes&) = delete;
  ~SpanNotes();
  // Those that have ended since, of all threads.
  std::vector<TraceEvent> ended() const;
};

// From its construction to end(), or its destruction.
class Span {
 public:
  explicit Span(TraceKind kind, std::string_view name, Pid target = {}, std::uint64_t bytes = 0);
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  ~Span() { end(); }
  void end();
  void set_bytes(std::uint64_t bytes) { event_.bytes = bytes; }

 private:
  bool open_ = false;
  TraceEvent event_;
};

}  // namespace stasis
