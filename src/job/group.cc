#include "job/group.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "group/group_directory.h"

namespace stasis::job {
namespace {

constexpr std::array<std::string_view, 3> kPlaces = {"start", "save", "save-end"};

std::string place_of(const JobGroup& group, Together what) {
  return group.dir + "/" + std::string(kPlaces.at(static_cast<std::size_t>(what)));
}

}  // namespace

Result<void> open_group(JobGroup& group) {
  STASIS_TRY(GroupDirectory::open(group.dir));
  std::error_code failed;
  const auto place = std::filesystem::canonical(group.dir, failed);
  if (failed) return fail(errno_error("cannot find " + group.dir, failed.value()));
  group.dir = place.string();
  return {};
}

void leave_group(const JobGroup& group) {
  if (group.has_others()) (void)::rmdir(group.dir.c_str());
}

bool is_begun(const JobGroup& group, Together what) {
  const std::string place = place_of(group, what);
  const auto is_there = [](const std::string& path) {
    struct stat found {};
    return ::lstat(path.c_str(), &found) == 0;
  };
  // One that is decided is over soon, and its directory gone.
  return is_there(place) && !is_there(place + "/" + kFirstDecision);
}

Result<std::unique_ptr<GroupPart>> join(const JobGroup& group, Together what,
                                        GroupPartOptions options, const Interrupt& interrupt) {
  STASIS_TRY_ASSIGN(auto directory, GroupDirectory::open(place_of(group, what)));
  options.parts = group.parts;
  options.name = group.part;
  return GroupPart::join(std::move(directory), std::move(options), interrupt);
}

Result<void> start_together(const JobGroup& group, std::chrono::milliseconds timeout,
                            const Interrupt& interrupt) {
  GroupPartOptions options;
  options.operation = Operation::kStart;
  options.timeout = timeout;
  STASIS_TRY_ASSIGN(auto part, join(group, Together::kStart, std::move(options), interrupt));
  STASIS_TRY(part->wait_for_all());
  return part->finish();
}

}  // namespace stasis::job
