#include "rendezvous/record_store.h"

#include "group/group_rendezvous.h"

namespace stasis::rendezvous {
namespace {

// Of all records: 1024 parts with 2,000 connections each take 100 MB.
constexpr std::size_t kMostBytes = 256 << 20;

}  // namespace

std::optional<std::string> RecordStore::read(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(name);
  return found == records_.end() ? std::nullopt : std::optional(found->second.text);
}

// With the lock.
bool RecordStore::put(const std::string& name, const std::string& owner, const std::string& text) {
  const auto found = records_.find(name);
  const std::size_t before = found == records_.end() ? 0 : found->second.text.size();
  if (found == records_.end() && records_.size() == kMostGroupNames) return false;
  if (text.size() > kMostGroupRecord || bytes_ - before + text.size() > kMostBytes) return false;
  bytes_ = bytes_ - before + text.size();
  records_[name] = {owner, text};
  return true;
}

bool RecordStore::write(const std::string& name, const std::string& owner,
                        const std::string& text) {
  const std::lock_guard lock(mutex_);
  return put(name, owner, text);
}

std::optional<bool> RecordStore::claim(const std::string& name, const std::string& owner,
                                       const std::string& text) {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(name);
  if (found != records_.end()) return found->second.owner == owner && found->second.text == text;
  return put(name, owner, text) ? std::optional(true) : std::nullopt;
}

std::vector<std::string> RecordStore::names() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  for (const auto& [name, record] : records_)
    out.push_back(name);
  return out;
}

void RecordStore::remove(const std::vector<std::string>& names) {
  const std::lock_guard lock(mutex_);
  for (const std::string& name : names) {
    const auto found = records_.find(name);
    if (found == records_.end()) continue;
    bytes_ -= found->second.text.size();
    records_.erase(found);
  }
}

Answer RecordStore::answer(const Request& request, const std::string& owner) {
  switch (request.verb) {
    case Verb::kHello:
      break;
    case Verb::kRead: {
      auto text = read(request.name);
      return text ? Answer{Outcome::kText, std::move(*text)} : Answer{Outcome::kNone, {}};
    }
    case Verb::kWrite:
      return {write(request.name, owner, request.text) ? Outcome::kDone : Outcome::kFull, {}};
    case Verb::kClaim: {
      const auto claimed = claim(request.name, owner, request.text);
      if (!claimed) return {Outcome::kFull, {}};
      return {*claimed ? Outcome::kDone : Outcome::kTaken, {}};
    }
    case Verb::kNames:
      return {Outcome::kText, names_to_text(names())};
    case Verb::kRemove:
      if (const auto names = names_from_text(request.text)) remove(*names);
      break;
  }
  return {Outcome::kDone, {}};
}

}  // namespace stasis::rendezvous
