#include "direct/agent_page.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>

#include <fmt/format.h>

#include "proc/served_files.h"

namespace stasis::direct {

std::vector<std::string> paths_of_page(Pid pid, std::error_code& failed, Clock::time_point until) {
  std::vector<std::string> found;
  const std::string directory = fmt::format("/proc/{}/fd", pid.value);
  const std::string wanted = fmt::format("/memfd:{} (deleted)", kAgentMemfd);
  for (std::filesystem::directory_iterator it(directory, failed), end; !failed && it != end;
       it.increment(failed)) {
    if (Clock::now() >= until) {
      failed = std::make_error_code(std::errc::timed_out);
      break;
    }
    std::error_code gone;
    if (std::filesystem::read_symlink(it->path(), gone) == wanted) found.push_back(it->path());
  }
  return found;
}

bool is_agent_page(const proc::Mapping& mapping) {
  static const std::uint64_t memory = [] {
    const UniqueFd one(::memfd_create("stasis", MFD_CLOEXEC));
    struct stat own {};
    return ::fstat(one.get(), &own) == 0 ? std::uint64_t{own.st_dev} : 0;
  }();
  return mapping.device == memory &&
         mapping.path.find(fmt::format("/memfd:{}", kAgentMemfd)) != std::string::npos;
}

Result<UniqueFd> open_page(const std::string& path, int access) {
  return open_checked(AT_FDCWD, path, access, &is_memory_file);
}

bool is_closed(const std::string& path) {
  std::error_code failed;
  (void)std::filesystem::read_symlink(path, failed);
  return failed == std::errc::no_such_file_or_directory || failed == std::errc::no_such_process;
}

bool is_page_of(const ControlPage& page, int ns_pid) {
  return page.magic == kAgentMagic && page.version == kAgentVersion &&
         page.bytes == sizeof(ControlPage) && page.pid == ns_pid;
}

bool is_page_of_another_version(const ControlPage& page, int ns_pid) {
  return page.magic == kAgentMagic && page.version != kAgentVersion && page.pid == ns_pid;
}

}  // namespace stasis::direct
