// What a verb did when, as a file for the viewers of Chrome's trace format (Perfetto,
// chrome://tracing): an object with "traceEvents", of which those of phase "X" have a begin and a
// duration in microseconds. Times count from the first of them.
//
// Functions without state but that of base/trace.h; any thread.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "base/result.h"

namespace stasis {

// What this process has done until now, as events of a trace; times are those of Clock.
nlohmann::json trace_of_process(const std::string& name);
// Writes events into a file. Follows no link that another user than root and the caller (also by
// sudo) can have put there, and writes into no other user's file. kIo, kNoSpace, kNotPermitted.
Result<void> write_trace(const std::string& path, nlohmann::json events);
// The same, whole or not at all: what was there stays on an error.
Result<void> replace_trace(const std::string& path, nlohmann::json events);

}  // namespace stasis
