#include "base/trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace stasis {

namespace {

std::atomic<bool> g_on{false};
std::mutex g_mutex;
std::vector<TraceEvent>& events() {
  static std::vector<TraceEvent> all;
  return all;
}

// One taker at a time begins them anew; two would share what the later one has begun.
std::atomic<int> g_takers{0};
std::vector<TraceEvent>& notes() {
  static std::vector<TraceEvent> all;
  return all;
}
bool is_wanted() { return trace_is_on() || g_takers.load(std::memory_order_relaxed) > 0; }

}  // namespace

const char* trace_kind_name(TraceKind kind) {
  switch (kind) {
    case TraceKind::kPhase:
      return "phase";
    case TraceKind::kDriver:
      return "driver";
    case TraceKind::kAgent:
      return "agent";
    case TraceKind::kMover:
      return "mover";
    case TraceKind::kCriu:
      return "criu";
    case TraceKind::kImage:
      return "image";
  }
  return "other";
}

void trace_begin() { g_on.store(true, std::memory_order_relaxed); }

bool trace_is_on() { return g_on.load(std::memory_order_relaxed); }

void trace_record(TraceEvent event) {
  if (!is_wanted()) return;
  event.thread = static_cast<int>(::syscall(SYS_gettid));
  const std::lock_guard lock(g_mutex);
  if (g_takers.load() > 0 && notes().size() < SpanNotes::kMost) notes().push_back(event);
  if (trace_is_on()) events().push_back(std::move(event));
}

std::vector<TraceEvent> trace_events() {
  const std::lock_guard lock(g_mutex);
  return events();
}

SpanNotes::SpanNotes() {
  const std::lock_guard lock(g_mutex);
  notes().clear();
  ++g_takers;
}
SpanNotes::~SpanNotes() {
  const std::lock_guard lock(g_mutex);
  if (--g_takers == 0) notes().clear();
}
std::vector<TraceEvent> SpanNotes::ended() const {
  const std::lock_guard lock(g_mutex);
  return notes();
}

Span::Span(TraceKind kind, std::string_view name, Pid target, std::uint64_t bytes) {
  if (!is_wanted()) return;
  open_ = true;
  event_ = {kind, std::string(name), Clock::now(), {}, 0, target, bytes};
}

void Span::end() {
  if (!std::exchange(open_, false)) return;
  event_.end = Clock::now();
  trace_record(std::move(event_));
}

}  // namespace stasis
