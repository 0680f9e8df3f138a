#include "operations/image_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis {
namespace {

using testing::ElementsAre;

TEST(ImageReport, OptionsAreGivenAsTheCommandLineTakesThem) {
  CriuOptions criu;
  EXPECT_THAT(options_used(criu), ElementsAre());  // what was not given is not said
  criu.shell_job = true;
  criu.tcp_established = true;
  criu.link_remap = false;
  criu.ghost_limit = 1;
  criu.external = {"mnt[/data]:data", "x"};
  criu.cgroups = CgroupMode::kFull;
  criu.lsm_profile = "apparmor:other";
  EXPECT_THAT(options_used(criu),
              ElementsAre("--shell-job", "--tcp-established", "--no-link-remap", "--ghost-limit 1",
                          "--external mnt[/data]:data", "--external x", "--manage-cgroups full",
                          "--network-lock nftables", "--lsm-profile apparmor:other"));
}

}  // namespace
}  // namespace stasis
