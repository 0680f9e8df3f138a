#include "cli/group.h"

#include <utility>

#include <fmt/format.h>

#include "cli/help.h"
#include "group/group_directory.h"
#include "operations/operations.h"
#include "rendezvous/tcp_rendezvous.h"

namespace stasis::cli {

std::string why_no_part_name(const std::string& name) {
  if (is_part_name(name)) return {};
  return fmt::format(
      "'{}' is no name of a part; take letters, digits, '.', '_' and '-', 64 at most", name);
}

CLI::Option* GroupOptions::add_to(CLI::App& command) {
  CLI::Option* group =
      command
          .add_option("--group", place_,
                      "together with the tools of other nodes, each for its own part of the job: a "
                      "directory that all see, made by the first that comes and removed by the "
                      "last; or tcp://HOST:PORT, at which the tool on that node answers the others")
          ->type_name("DIR|ADDRESS");
  CLI::Option* secret =
      command
          .add_option(
              "--group-secret", secret_file_,
              "with --group tcp://HOST:PORT: a file, of this user or root and closed to all "
              "others, that is the same on all nodes; 16 random bytes at least")
          ->type_name("FILE");
  secret->needs(group);
  CLI::Option* parts =
      command.add_option("--parts", parts_, "with --group: how many tools take part, of all nodes")
          ->type_name("N")
          ->check(whole_number(1, kMostParts));
  command.add_option("--part", name_, "with --group: what messages call this part [HOST-PID]")
      ->type_name("NAME")
      ->check(&why_no_part_name)
      ->needs(group);
  parts->needs(group);
  group->needs(parts);
  return group;
}

Result<void> GroupOptions::open() {
  if (place_.empty()) return {};
  const bool is_address = rendezvous::TcpRendezvous::is_address(place_);
  if (is_address != !secret_file_.empty()) {
    return is_address
               ? fail(ErrorCode::kUsage,
                      fmt::format("a group that meets at {} needs a secret", place_),
                      "make one: `(umask 077; head -c 32 /dev/urandom >FILE)`, copy it to "
                      "all nodes, and give --group-secret FILE")
               : fail(ErrorCode::kUsage,
                      fmt::format("a group that meets in a directory ({}) has no secret", place_),
                      "leave --group-secret out, or give --group tcp://HOST:PORT");
  }
  if (is_address) {
    STASIS_TRY_ASSIGN(rendezvous_, rendezvous::TcpRendezvous::open(place_, secret_file_));
  } else {
    STASIS_TRY_ASSIGN(rendezvous_, GroupDirectory::open(place_));
  }
  return {};
}

Result<std::unique_ptr<GroupPart>> GroupOptions::join(Operation operation,
                                                      std::chrono::milliseconds timeout,
                                                      const Interrupt& interrupt) {
  if (!rendezvous_) return std::unique_ptr<GroupPart>();
  GroupPartOptions options;
  options.operation = operation;
  options.parts = parts_;
  options.name = name_.empty() ? default_part_name() : name_;
  options.timeout = timeout;
  return join(std::move(options), interrupt);
}

Error GroupOptions::refuse(Operation operation, std::chrono::milliseconds timeout,
                           const Interrupt& interrupt, Error why) {
  // The user waits for the reason: not for as long as for parts that are to do something.
  constexpr std::chrono::milliseconds kLongest{6000};
  const bool is_longer = timeout.count() == 0 || timeout > kLongest;
  const auto part = join(operation, is_longer ? kLongest : timeout, interrupt);
  return part && *part ? (*part)->give_up(std::move(why)) : why;
}

Result<std::unique_ptr<GroupPart>> GroupOptions::join_image(const RestoreOptions& restore,
                                                            std::chrono::milliseconds timeout,
                                                            const Interrupt& interrupt) {
  if (!rendezvous_) return std::unique_ptr<GroupPart>();
  auto of_image = part_of_image(restore);
  if (!of_image)
    return fail(refuse(Operation::kRestore, timeout, interrupt, std::move(of_image.error())));
  GroupPartOptions options = std::move(*of_image);
  if (options.parts != parts_ || (!name_.empty() && name_ != options.name)) {
    return fail(
        refuse(Operation::kRestore, timeout, interrupt,
               {ErrorCode::kUsage,
                fmt::format("{} is the image of part {} of {}", restore.images_dir, options.name,
                            options.parts),
                fmt::format("restore it with --parts {} --part {}", options.parts, options.name)}));
  }
  options.timeout = timeout;
  return join(std::move(options), interrupt);
}

Result<std::unique_ptr<GroupPart>> GroupOptions::join(GroupPartOptions options,
                                                      const Interrupt& interrupt) {
  return GroupPart::join(std::move(rendezvous_), std::move(options), interrupt);
}

Result<void> leave_group(GroupPart* part, const std::string& done) {
  if (part == nullptr) return {};
  auto heard = part->leave();
  if (heard) return {};
  heard.error().message = done + "; " + heard.error().message;
  return heard;
}

}  // namespace stasis::cli
