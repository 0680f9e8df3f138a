#include "proc/descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

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
