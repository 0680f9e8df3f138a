#include "sim/faults.h"

#include <algorithm>
#include <charconv>

#include "sim/config.h"
#include "sim/control.h"

namespace stasis::sim {
namespace {

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

bool parse_action(std::string_view word, FaultAction& out) {
  if (word == "lock")
    out = FaultAction::kLock;
  else if (word == "checkpoint")
    out = FaultAction::kCheckpoint;
  else if (word == "restore")
    out = FaultAction::kRestore;
  else if (word == "unlock")
    out = FaultAction::kUnlock;
  else if (word == "copy")
    out = FaultAction::kCopy;
  else if (word == "context")
    out = FaultAction::kContext;
  else if (word == "import")
    out = FaultAction::kImport;
  else if (word == "transfer")
    out = FaultAction::kTransfer;
  else if (word == "module")
    out = FaultAction::kModule;
  else if (word == "limit")
    out = FaultAction::kLimit;
  else if (word == "reserve")
    out = FaultAction::kReserve;
  else if (word == "allocate")
    out = FaultAction::kAllocate;
  else
    return false;
  return true;
}

bool moves_content(FaultAction action) {
  return action == FaultAction::kCheckpoint || action == FaultAction::kRestore ||
         action == FaultAction::kCopy;
}

std::string parse_effect(std::string_view word, Fault& fault) {
  const auto equals = word.find('=');
  const auto name = word.substr(0, equals);
  const auto value = equals == word.npos ? std::string_view{} : word.substr(equals + 1);
  const bool copy = fault.action == FaultAction::kCopy;
  std::string ignored;
  if (name == "rate") {
    fault.effect = FaultEffect::kRate;
    if (!moves_content(fault.action)) return "only checkpoint, restore and copy have a rate";
    if (!parse_size(value, fault.value, ignored) || fault.value == 0) return "not a rate";
    return {};
  }
  if (copy) return "copy takes only rate=";
  if (name == "error") {
    fault.effect = FaultEffect::kError;
    if (!parse_number(value, fault.value) || fault.value == 0 || fault.value > 999) {
      return "not a CUDA result code from 1 to 999";
    }
    return {};
  }
  if (name == "delay") {
    fault.effect = FaultEffect::kDelay;
    if (!parse_duration(value, fault.value)) return "not a duration like 500ms or 2s";
    return {};
  }
  if (equals != word.npos) return "takes no value";
  if (name == "oom") {
    fault.effect = FaultEffect::kError;
    fault.value = 2;
  } else if (name == "timeout") {
    fault.effect = FaultEffect::kTimeout;
    if (fault.action != FaultAction::kLock) return "only lock can time out";
  } else if (name == "hang") {
    fault.effect = FaultEffect::kHang;
  } else if (name == "die") {
    fault.effect = FaultEffect::kDie;
  } else if (name == "failed") {
    fault.effect = FaultEffect::kFailed;
    if (is_own_call(fault.action)) return "only a checkpoint call can end in the state failed";
  } else {
    return "unknown effect";
  }
  return {};
}

// "checkpoint:error=999@2 pid=17"
std::string parse_clause(std::string_view clause, Fault& fault) {
  if (const auto space = clause.find_first_of(" \t"); space != clause.npos) {
    auto rest = trimmed(clause.substr(space));
    clause = clause.substr(0, space);
    if (std::uint64_t gpu = 0; rest.starts_with("gpu=") && parse_number(rest.substr(4), gpu) &&
                               gpu < static_cast<std::uint64_t>(kMaxGpus)) {
      fault.gpu = static_cast<int>(gpu);
    } else if (!rest.starts_with("pid=") || !parse_number(rest.substr(4), fault.pid) ||
               !fault.pid) {
      return "after the effect only pid=N or gpu=N may follow";
    }
  }
  const auto colon = clause.find(':');
  if (colon == clause.npos) return "no ':' after the action";
  if (!parse_action(clause.substr(0, colon), fault.action)) {
    return "unknown action (lock, checkpoint, restore, unlock, copy, context, import, transfer, "
           "module, limit)";
  }
  if (fault.gpu != kAnyGpu && fault.action != FaultAction::kTransfer) {
    return "only a transfer is of one GPU";
  }
  auto effect = clause.substr(colon + 1);
  if (const auto at = effect.find('@'); at != effect.npos) {
    if (!parse_number(effect.substr(at + 1), fault.nth) || !fault.nth)
      return "not a count after '@'";
    effect = effect.substr(0, at);
  }
  return parse_effect(effect, fault);
}

}  // namespace

bool parse_faults(std::string_view text, std::vector<Fault>& out, std::string& error) {
  out.clear();
  while (!text.empty()) {
    const auto end = text.find_first_of(";\n");
    auto clause = text.substr(0, end);
    // A comment runs to the end of its line, over any ';' in it.
    if (const auto hash = text.find('#'); hash < std::min(end, text.size())) {
      clause = text.substr(0, hash);
      const auto line = text.find('\n', hash);
      text = line == text.npos ? std::string_view{} : text.substr(line + 1);
    } else {
      text = end == text.npos ? std::string_view{} : text.substr(end + 1);
    }
    clause = trimmed(clause);
    if (clause.empty()) continue;
    Fault fault;
    if (auto why = parse_clause(clause, fault); !why.empty()) {
      error = "fault '" + std::string(clause) + "': " + why;
      return false;
    }
    out.push_back(fault);
  }
  return true;
}

Plan plan_for(const std::vector<Fault>& faults, FaultAction action, std::uint64_t nth,
              std::uint64_t pid, int gpu) {
  Plan plan;
  for (const auto& fault : faults) {
    const bool copies = fault.action == FaultAction::kCopy && moves_content(action);
    if (fault.action != action && !copies) continue;
    if (fault.nth && fault.nth != nth) continue;
    if (fault.pid && fault.pid != pid) continue;
    if (fault.gpu != kAnyGpu && fault.gpu != gpu) continue;
    switch (fault.effect) {
      case FaultEffect::kError:
        plan.error = fault.value;
        break;
      case FaultEffect::kTimeout:
        plan.timeout = true;
        break;
      case FaultEffect::kHang:
        plan.hang = true;
        break;
      case FaultEffect::kDelay:
        plan.delay_ns = std::max(plan.delay_ns, fault.value);
        break;
      case FaultEffect::kRate:
        plan.rate = fault.value;
        break;
      case FaultEffect::kDie:
        plan.die = true;
        break;
      case FaultEffect::kFailed:
        plan.failed = true;
        break;
    }
  }
  return plan;
}

}  // namespace stasis::sim
