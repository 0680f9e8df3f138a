#include "base/operation.h"

#include <array>
#include <cstddef>

namespace stasis {
namespace {

// In the order of the enumerators.
constexpr auto kOperationNames =
    std::to_array<std::string_view>({"", "suspend", "resume", "dump", "restore", "attach", "swap",
                                     "start", "criu dump", "criu restore"});
static_assert(kOperationNames.size() == static_cast<std::size_t>(Operation::kCriuRestore) + 1);

}  // namespace

std::string_view operation_name(Operation operation) {
  return kOperationNames.at(static_cast<std::size_t>(operation));
}

bool writes_image(const RecordedOperation& operation) { return operation == Operation::kDump; }

bool is_done_by_criu(const RecordedOperation& operation) {
  return operation.name().starts_with("criu ");
}

}  // namespace stasis
