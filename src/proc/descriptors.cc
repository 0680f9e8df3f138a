#include "proc/descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "proc/served_files.h"
#include "proc/silent_child.h"

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

bool is_no_socket(const struct stat& info) { return !S_ISSOCK(info.st_mode); }

bool may_be_memory(const struct stat& info) {
  // Files without a name have no kind before Linux 6.17.
  return S_ISREG(info.st_mode) || S_ISCHR(info.st_mode) || (info.st_mode & S_IFMT) == 0;
}

Result<UniqueFd> take_descriptor(Pid pid, const Pidfd& process, int number,
                                 const FileCheck& accept) {
  const auto is_other = [&] {
    return fail(refusal(
        {"forged-descriptor", Severity::kRed, pid,
         fmt::format("descriptor {} of process {} is not the kind of file that belongs there",
                     number, pid.value),
         "do not trust that process"}));
  };
  const auto before = known_status(fmt::format("/proc/{}/fd/{}", pid.value, number));
  if (before && !accept(*before)) return is_other();
  if (is_served(pid, number)) {
    return fail(refusal(
        {"silent-files", Severity::kRed, pid,
         fmt::format("descriptor {} of process {} is a file of a file system that does not answer, "
                     "or that a program serves (FUSE)",
                     number, pid.value),
         "do not trust that process"}));
  }
  STASIS_TRY_ASSIGN(auto taken, take_nameless(pid, process, number));
  const auto after = known_status(taken);
  if (after && accept(*after)) return taken;
  drop(std::move(taken));
  return is_other();
}

Result<UniqueFd> take_nameless(Pid pid, const Pidfd& process, int number) {
  UniqueFd taken(static_cast<int>(::syscall(SYS_pidfd_getfd, process.fd(), number, 0)));
  if (taken.valid()) return taken;
  return fail(errno_error(fmt::format("cannot take descriptor {} of process {}", number, pid.value),
                          errno));
}

void DroppedCopies::add(UniqueFd copy) {
  constexpr std::size_t kAtOnce = 64;
  linger how{};
  socklen_t size = sizeof how;
  // Whatever time it tells: the longest ones are told as others.
  if (::getsockopt(copy.get(), SOL_SOCKET, SO_LINGER, &how, &size) != 0 || how.l_onoff == 0) return;
  lingering_.push_back(std::move(copy));
  if (lingering_.size() >= kAtOnce) let_go();
}

void DroppedCopies::let_go() {
  if (lingering_.empty()) return;
  auto child = SilentChild::start([] {
    for (;;)
      ::pause();
  });
  // The child has copies of them still.
  lingering_.clear();
  child.end(std::chrono::seconds(5));
}

void drop(UniqueFd copy) {
  DroppedCopies one;
  one.add(std::move(copy));
}

}  // namespace stasis::proc
