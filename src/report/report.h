// What operations and errors look like as JSON: the one form that `stasis --json`, the C interface
// and the Python package give. Pure functions. Strings from processes and images are as they were
// found; json_text() makes them safe to show.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "criu/criu_log.h"
#include "operations/operations.h"

namespace stasis {

nlohmann::json to_json(const ProcessReport& process);
nlohmann::json to_json(const Report& report);
nlohmann::json to_json(const AttachReport& report);
nlohmann::json to_json(const DumpReport& report);
nlohmann::json to_json(const RestoreReport& report);
nlohmann::json to_json(const ImageReport& report);
nlohmann::json to_json(const VerifyReport& report);
nlohmann::json to_json(const ContentReport& content);
nlohmann::json to_json(const MachineFacts& here);
nlohmann::json to_json(const RecoverReport& report);
// Of `recover --all`, or of one.
nlohmann::json to_json(const std::vector<RecoverReport>& reports);
// "direct": part of the GPU memory at least; "driver": none. Where nothing was done, what has moved
// it before, or null if that is not known.
const char* path_name(const Report& report);
// "16.2 GiB", "16.2 GiB, 0.9 GiB of it written"
std::string size_text(const DumpReport& report);
// "process 12", "process 12 and what is below it (3 processes, 2 with CUDA)"
std::string subject_text(const Report& report);
std::string subject_text(Pid root, const std::vector<ProcessReport>& processes);
// {"ok": false, "error": {...}}
nlohmann::json to_json(const Error& error);
nlohmann::json to_json(const CriuDiagnosis& diagnosis);

// As it is printed: indented, and in ASCII, because what a program calls itself need not be UTF-8,
// and may hold what a terminal obeys.
std::string json_text(const nlohmann::json& object);

}  // namespace stasis
