#include "rendezvous/secret.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/scope_guard.h"

namespace stasis::rendezvous {
namespace {

constexpr std::string_view kOfSecrets = "stasis: the key of a group";
constexpr const char* kHowToMake =
    "make one: `(umask 077; head -c 32 /dev/urandom >FILE)`, and copy it to all nodes";

}  // namespace

Result<GroupKey> GroupKey::from_secret(std::string_view secret) {
  if (::sodium_init() < 0) return fail(ErrorCode::kInternal, "libsodium does not start");
  if (secret.size() < kLeastSecret) {
    return fail(ErrorCode::kUsage,
                fmt::format("the group's secret has {} bytes, and takes {} at least", secret.size(),
                            kLeastSecret),
                kHowToMake);
  }
  GroupKey out;
  ::crypto_generichash(
      out.bytes_.data(), out.bytes_.size(), reinterpret_cast<const unsigned char*>(secret.data()),
      secret.size(), reinterpret_cast<const unsigned char*>(kOfSecrets.data()), kOfSecrets.size());
  return out;
}

Result<GroupKey> GroupKey::from_file(const std::string& path) {
  STASIS_TRY_ASSIGN(const auto file,
                    open_checked(AT_FDCWD, path, O_RDONLY | O_NOFOLLOW, &is_regular_file));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return fail(errno_error("cannot stat " + path, errno));
  if ((info.st_uid != ::geteuid() && info.st_uid != 0) || (info.st_mode & 0077) != 0) {
    return fail(ErrorCode::kNotPermitted,
                fmt::format("the group's secret {} belongs to user {}, mode {:04o}: others may "
                            "know it",
                            path, info.st_uid, info.st_mode & 07777),
                fmt::format("make another, as the user who runs this: `(umask 077; head -c 32 "
                            "/dev/urandom >FILE)`, or `chmod 600 {}` if no other has read it",
                            path));
  }
  STASIS_TRY_ASSIGN(std::string secret, read_file(file, path, kMostSecret));
  const ScopeGuard wipe([&] { ::sodium_memzero(secret.data(), secret.size()); });
  return from_secret(secret);
}

GroupKey::GroupKey(GroupKey&& other) noexcept : bytes_(other.bytes_) {
  ::sodium_memzero(other.bytes_.data(), other.bytes_.size());
}

GroupKey::~GroupKey() { ::sodium_memzero(bytes_.data(), bytes_.size()); }

}  // namespace stasis::rendezvous
