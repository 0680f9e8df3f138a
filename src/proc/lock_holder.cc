#include "proc/lock_holder.h"

#include <sys/sysmacros.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include <fmt/format.h>

namespace stasis::proc {

std::optional<Pid> lock_holder(const UniqueFd& file) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return std::nullopt;
  return lock_holder(status);
}

std::optional<Pid> lock_holder(const struct stat& status) {
  const std::string file_place =
      fmt::format("{:02x}:{:02x}:{}", major(status.st_dev), minor(status.st_dev), status.st_ino);
  std::ifstream locks("/proc/locks");
  std::string number, kind, advisory, access, place;
  pid_t pid = 0;
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    if (!(fields >> number >> kind >> advisory >> access >> pid >> place)) continue;
    if (kind == "FLOCK" && pid > 0 && place == file_place) return Pid{pid};
  }
  return std::nullopt;
}

bool is_tool(const ProcessInfo& process) {
  const std::string program = fmt::format("/proc/{}/exe", process.pid.value);
  const auto its = known_status(program);
  const auto ours = known_status("/proc/self/exe");
  if (its && ours && its->st_dev == ours->st_dev && its->st_ino == ours->st_ino) return true;
  std::error_code failed;
  const auto name = std::filesystem::read_symlink(program, failed).filename().string();
  const auto has_library = ProcFs().maps_file(process.pid, "libstasis.so");
  return process.comm.starts_with("stasis") || name.starts_with("stasis") || name == "criu" ||
         name == "cuda-checkpoint" || (has_library && *has_library);
}

std::optional<ProcessInfo> lock_holder_that_is_no_tool(const UniqueFd& file) {
  const auto holder = lock_holder(file);
  const auto process = holder ? ProcFs().process(*holder) : Result<ProcessInfo>(ProcessInfo{});
  if (!holder || !process || is_tool(*process)) return std::nullopt;
  return *process;
}

}  // namespace stasis::proc
