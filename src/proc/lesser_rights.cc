#include "proc/lesser_rights.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

constexpr std::uint64_t kTrace = std::uint64_t{1} << CAP_SYS_PTRACE;
constexpr std::uint64_t kChangeUser =
    (std::uint64_t{1} << CAP_SETUID) | (std::uint64_t{1} << CAP_SETGID);
constexpr unsigned kUnchanged = ~0U;

struct Credentials {
  std::array<unsigned, 3> uid{};  // real, effective, saved
  std::array<unsigned, 3> gid{};
  std::uint64_t permitted = 0;

  bool is_one_user() const {
    return uid[0] == uid[1] && uid[0] == uid[2] && gid[0] == gid[1] && gid[0] == gid[2];
  }
};

std::optional<Credentials> credentials_of(Pid pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid.value));
  if (!text) return std::nullopt;
  const auto numbers = [&](const char* key, std::array<unsigned, 3>& out) {
    const std::size_t at = text->find(key);
    if (at == std::string::npos) return false;
    const char* from = text->c_str() + at + std::char_traits<char>::length(key);
    for (unsigned& number : out) {
      char* end = nullptr;
      number = static_cast<unsigned>(std::strtoul(from, &end, 10));
      if (end == from) return false;
      from = end;
    }
    return true;
  };
  Credentials out;
  const std::size_t capabilities = text->find("\nCapPrm:");
  if (!numbers("\nUid:", out.uid) || !numbers("\nGid:", out.gid) ||
      capabilities == std::string::npos)
    return std::nullopt;
  out.permitted = std::strtoull(text->c_str() + capabilities + 8, nullptr, 16);
  return out;
}

bool in_our_user_namespace(Pid pid) {
  struct stat its {};
  struct stat ours {};
  return ::stat(fmt::format("/proc/{}/ns/user", pid.value).c_str(), &its) == 0 &&
         ::stat("/proc/self/ns/user", &ours) == 0 && its.st_ino == ours.st_ino;
}

using CapabilityData = std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3>;

__user_cap_header_struct this_thread() { return {_LINUX_CAPABILITY_VERSION_3, 0}; }

std::uint64_t both(const CapabilityData& data, std::uint32_t __user_cap_data_struct::*part) {
  return data[0].*part | std::uint64_t{data[1].*part} << 32;
}

bool set_capabilities(std::uint64_t effective, std::uint64_t permitted, std::uint64_t inheritable) {
  auto header = this_thread();
  CapabilityData data{};
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i].effective = static_cast<std::uint32_t>(effective >> (32 * i));
    data[i].permitted = static_cast<std::uint32_t>(permitted >> (32 * i));
    data[i].inheritable = static_cast<std::uint32_t>(inheritable >> (32 * i));
  }
  return ::syscall(SYS_capset, &header, data.data()) == 0;
}

}  // namespace

LesserRights LesserRights::of(Pid pid) {
  LesserRights out;
  auto header = this_thread();
  CapabilityData data{};
  const auto target = credentials_of(pid);
  if (!target || ::syscall(SYS_capget, &header, data.data()) != 0) return out;
  out.effective_ = both(data, &__user_cap_data_struct::effective);
  out.permitted_ = both(data, &__user_cap_data_struct::permitted);
  out.inheritable_ = both(data, &__user_cap_data_struct::inheritable);
  out.uid_ = target->uid[0];
  out.gid_ = target->gid[0];
  out.own_uid_ = ::getuid();
  out.own_gid_ = ::getgid();
  const bool same_user = out.uid_ == out.own_uid_ && out.gid_ == out.own_gid_;
  const bool may_all = target->is_one_user() && target->uid[0] == 0 &&
                       (out.permitted_ & ~target->permitted) == 0 && in_our_user_namespace(pid);
  if ((out.effective_ & kTrace) == 0 || may_all)
    out.way_ = Way::kAsItIs;
  else if (target->is_one_user() && (same_user || (out.effective_ & kChangeUser) == kChangeUser))
    out.way_ = Way::kGivenUp;
  return out;
}

// The real user and group only: what the thread may do to files goes by the others, and while these
// are ours the target's user cannot trace the thread.
LesserRights::Scope::Scope(const LesserRights& rights) : rights_(rights) {
  if (rights.way_ != Way::kGivenUp) {
    holds_ = rights.way_ == Way::kAsItIs;
    return;
  }
  holds_ = ::syscall(SYS_setresgid, rights.gid_, kUnchanged, kUnchanged) == 0 &&
           ::syscall(SYS_setresuid, rights.uid_, kUnchanged, kUnchanged) == 0 &&
           set_capabilities(rights.effective_ & ~kTrace, rights.permitted_, rights.inheritable_);
}

LesserRights::Scope::~Scope() {
  if (rights_.way_ != Way::kGivenUp) return;
  (void)set_capabilities(rights_.effective_, rights_.permitted_, rights_.inheritable_);
  (void)::syscall(SYS_setresuid, rights_.own_uid_, kUnchanged, kUnchanged);
  (void)::syscall(SYS_setresgid, rights_.own_gid_, kUnchanged, kUnchanged);
}

}  // namespace stasis::proc
