#include "proc/descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "proc/served_files.h"

namespace stasis::proc {

std::optional<DescriptorLimit> descriptor_limit(Pid pid, const std::string& proc) {
  constexpr std::string_view kKey = "Max open files";
  const auto text = read_file(AT_FDCWD, fmt::format("{}/{}/limits", proc, pid.value));
  const std::size_t at = text ? text->find(kKey) : std::string::npos;
  if (at == std::string::npos) return std::nullopt;
  const std::size_t figure = text->find_first_not_of(' ', at + kKey.size());
  if (figure == std::string::npos) return std::nullopt;
  DescriptorLimit out;
  const char* const end = text->data() + text->size();
  if (std::from_chars(text->data() + figure, end, out.limit).ec != std::errc())
    return std::nullopt;  // "unlimited"
  out.hard = out.limit;
  if (const std::size_t second = text->find_first_of(' ', figure); second != std::string::npos) {
    const std::size_t begin = text->find_first_not_of(' ', second);
    // "unlimited" is more than there can be.
    if (begin != std::string::npos &&
        std::from_chars(text->data() + begin, end, out.hard).ec != std::errc())
      out.hard = std::numeric_limits<std::uint64_t>::max();
  }
  const DirectoryStream open = list_open(fmt::format("{}/{}/fd", proc, pid.value));
  if (!open) return std::nullopt;
  out.spare = out.limit;
  while (const dirent* entry = ::readdir(open.get())) {
    std::uint64_t number = 0;
    const char* const name = entry->d_name;
    const bool is_number =
        std::from_chars(name, name + std::strlen(name), number).ec == std::errc();
    if (is_number && number < out.limit && out.spare > 0) --out.spare;
  }
  return out;
}

std::string raise_command(Pid pid, const DescriptorLimit& limit) {
  constexpr std::uint64_t kMore = 64;
  const std::uint64_t wanted = limit.limit + kMore;
  return wanted <= limit.hard
             ? fmt::format("prlimit --pid {} --nofile={}:", pid.value, wanted)
             : fmt::format("prlimit --pid {} --nofile={}:{}", pid.value, wanted, wanted);
}

Result<UniqueFd> take_descriptor(Pid pid, const Pidfd& process, int number) {
  if (is_served(pid, number)) {
    return fail(
        ErrorCode::kNotSupported,
        fmt::format("descriptor {} of process {} is a file of a file system that does not answer, "
                    "or that a program serves (FUSE)",
                    number, pid.value),
        "do not trust that process");
  }
  return take_nameless(pid, process, number);
}

Result<UniqueFd> take_nameless(Pid pid, const Pidfd& process, int number) {
  UniqueFd taken(static_cast<int>(::syscall(SYS_pidfd_getfd, process.fd(), number, 0)));
  if (taken.valid()) return taken;
  return fail(errno_error(fmt::format("cannot take descriptor {} of process {}", number, pid.value),
                          errno));
}

}  // namespace stasis::proc
