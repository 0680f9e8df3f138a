// Options of verbs that may be part of an operation on a job of several nodes.
//
// One thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/verbs.h"
#include "group/group_part.h"

namespace stasis::cli {

// For CLI11: empty if it is a name.
std::string why_no_part_name(const std::string& name);

class GroupOptions {
 public:
  // Adds --group, --group-secret, --parts and --part; gives the first.
  CLI::Option* add_to(CLI::App& command);

  // Opens the directory or the address, if one is given: before this process goes where the target
  // is.
  Result<void> open();
  // Joins. Null where no group is given. It starts a thread, so the driver is loaded before.
  Result<std::unique_ptr<GroupPart>> join(Operation operation, std::chrono::milliseconds timeout,
                                          const Interrupt& interrupt);
  // This part cannot begin for `why`: the other parts would wait for it for all of their time, and
  // not learn the reason. Joins and gives up, if a group is given. The error to report.
  Error refuse(Operation operation, std::chrono::milliseconds timeout, const Interrupt& interrupt,
               Error why);
  // The same for a restore: as the part that the image says. kUsage where the options say another,
  // or it is an image of no group.
  Result<std::unique_ptr<GroupPart>> join_image(const RestoreOptions& restore,
                                                std::chrono::milliseconds timeout,
                                                const Interrupt& interrupt);

 private:
  Result<std::unique_ptr<GroupPart>> join(GroupPartOptions options, const Interrupt& interrupt);

  std::string place_;
  std::string secret_file_;
  std::uint32_t parts_ = 0;
  std::string name_;
  std::unique_ptr<GroupRendezvous> rendezvous_;
};

// GroupPart::leave(), if there is one; an error says what is done all the same.
Result<void> leave_group(GroupPart* part, const std::string& done);

}  // namespace stasis::cli
