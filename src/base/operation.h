// What a tool does to targets: the names that records, reports and messages have for it, and what
// holds of it.
//
// Values; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace stasis {

enum class Operation {
  kNone,  // no record says that there was one
  kSuspend,
  kResume,
  kDump,
  kRestore,
  kAttach,
  kSwap,
  kStart,        // of a job of several nodes, by `stasis run`
  kCriuDump,     // these two by plugins/criu
  kCriuRestore,  // the last
};

// "dump", "criu dump"; empty: kNone. Records keep it, so a name stays as it is.
std::string_view operation_name(Operation operation);

// An operation by its name, as a record has it. One that a newer version has written keeps its
// name, and equals no Operation.
class RecordedOperation {
 public:
  RecordedOperation(Operation operation = Operation::kNone)  // NOLINT(google-explicit-constructor)
      : name_(operation_name(operation)) {}
  // Of any name; for JsonReader::named(), which takes an optional.
  static std::optional<RecordedOperation> from_name(std::string name) {
    RecordedOperation operation;
    operation.name_ = std::move(name);
    return operation;
  }

  const std::string& name() const { return name_; }
  bool operator==(const RecordedOperation&) const = default;

 private:
  std::string name_;
};

// Killed, it leaves half of an image.
bool writes_image(const RecordedOperation& operation);
// By criu with our plugin in it, not by `stasis`.
bool is_done_by_criu(const RecordedOperation& operation);

}  // namespace stasis
