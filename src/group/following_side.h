// The side of a part that follows: it hears from the one that leads, and decides by itself only to
// give the group up. Private to src/group.
#pragma once

#include <string>

#include "group/group_side.h"

namespace stasis {

class FollowingSide final : public GroupSide {
 public:
  using GroupSide::GroupSide;
  bool leads() const override { return false; }

 private:
  void look() override;
  // It knows only whether the one that leads says nothing.
  std::vector<std::string> busy_parts() const override;
  void hear(const std::string& text);

  std::string lead_text_;  // that was heard
};

}  // namespace stasis
