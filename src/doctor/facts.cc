#include "doctor/facts.h"

#include <sys/stat.h>

#include <fmt/format.h>

#include "base/result.h"

namespace stasis::doctor {
namespace {

std::size_t size_of(const proc::OpenFile& file) { return sizeof file + file.path.capacity(); }
std::size_t size_of(const proc::Mapping& mapping) {
  return sizeof mapping + mapping.path.capacity();
}
std::size_t size_of(const Tid& thread) { return sizeof thread; }

}  // namespace

template <class Fact, class Read>
std::shared_ptr<const std::vector<Fact>> Facts::ask(Known<Fact>& known, Pid pid, Read read) {
  {
    const std::scoped_lock lock(mutex_);
    if (const auto it = known.find(pid); it != known.end()) return it->second;
  }
  std::shared_ptr<const std::vector<Fact>> out;
  if (is_over()) return out;
  if (Result<std::vector<Fact>> facts = read())
    out = std::make_shared<const std::vector<Fact>>(std::move(*facts));
  std::size_t bytes = sizeof(Fact);
  for (std::size_t i = 0; out && i < out->size(); ++i)
    bytes += size_of((*out)[i]);
  const std::scoped_lock lock(mutex_);
  if (bytes_ + bytes > kMostBytes) return out;
  bytes_ += bytes;
  return known.try_emplace(pid, std::move(out)).first->second;
}

std::shared_ptr<const std::vector<proc::OpenFile>> Facts::open_files(Pid pid) {
  return ask(files_, pid, [&] { return procfs_.open_files(pid); });
}

std::shared_ptr<const std::vector<proc::Mapping>> Facts::mappings(Pid pid) {
  return ask(mappings_, pid, [&] { return procfs_.mappings(pid); });
}

std::vector<Tid> Facts::threads(Pid pid) {
  const auto out =
      ask(threads_, pid, [&] { return Result<std::vector<Tid>>(procfs_.threads(pid)); });
  return out ? *out : std::vector<Tid>();
}

ino_t Facts::namespace_at(std::string_view process, std::string_view kind) {
  const std::pair<std::string, std::string> key(process, kind);
  {
    const std::scoped_lock lock(mutex_);
    if (const auto it = namespaces_.find(key); it != namespaces_.end()) return it->second;
  }
  struct stat info {};
  const std::string path = fmt::format("/proc/{}/ns/{}", process, kind);
  const ino_t inode = ::stat(path.c_str(), &info) == 0 ? info.st_ino : 0;
  const std::scoped_lock lock(mutex_);
  return namespaces_.try_emplace(key, inode).first->second;
}

ino_t Facts::namespace_of(Pid pid, std::string_view kind) {
  return namespace_at(std::to_string(pid.value), kind);
}

ino_t Facts::our_namespace(std::string_view kind) { return namespace_at("self", kind); }

bool Facts::has_our_namespace(Pid pid, std::string_view kind) {
  const ino_t its = namespace_of(pid, kind);
  return its != 0 && its == our_namespace(kind);
}

}  // namespace stasis::doctor
