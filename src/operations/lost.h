// What an image does not hold, as sentences for people, so many of them.
//
// Private to src/operations. One thread at a time.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/ids.h"
#include "image/manifest_format.h"

namespace stasis {

class Lost {
 public:
  explicit Lost(std::vector<std::string>& out) : out_(out) {}
  void add(std::string what) {
    if (out_.size() + 1 < manifest_format::kMaxLost) {
      out_.push_back(std::move(what));
    } else if (++more_ == 1) {
      out_.emplace_back();
    }
    if (more_ > 0) out_.back() = fmt::format("and {} more", more_);
  }
  void add(Pid pid, int descriptor, const std::string& what) {
    add(fmt::format("process {} (descriptor {}): {}", pid.value, descriptor, what));
  }

 private:
  std::vector<std::string>& out_;
  std::size_t more_ = 0;
};

}  // namespace stasis
