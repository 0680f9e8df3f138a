#include "doctor/facts.h"

#include <unistd.h>

#include <algorithm>

#include <gtest/gtest.h>

#include "base/fd.h"

namespace stasis::doctor {
namespace {

const Pid kSelf{static_cast<int>(::getpid())};

TEST(Facts, AskAProcessOnce) {
  const proc::ProcFs procfs;
  Facts facts(procfs);
  const auto files = facts.open_files(kSelf);
  ASSERT_TRUE(files);
  const UniqueFd another(::dup(STDERR_FILENO));
  EXPECT_EQ(facts.open_files(kSelf), files);
  const auto now = Facts(procfs).open_files(kSelf);
  ASSERT_TRUE(now);
  EXPECT_TRUE(std::any_of(now->begin(), now->end(), [&](const proc::OpenFile& file) {
    return file.descriptor == another.get();
  }));
  EXPECT_EQ(facts.mappings(kSelf), facts.mappings(kSelf));
  EXPECT_FALSE(facts.threads(kSelf).empty());
}

TEST(Facts, OfAProcessThatIsNotThere) {
  const proc::ProcFs procfs;
  Facts facts(procfs);
  const Pid none{0x7fffffff};
  EXPECT_FALSE(facts.open_files(none));
  EXPECT_FALSE(facts.mappings(none));
  EXPECT_TRUE(facts.threads(none).empty());
  EXPECT_EQ(facts.namespace_of(none, "net"), 0U);
}

TEST(Facts, OurNamespacesAreThoseOfThisProcess) {
  const proc::ProcFs procfs;
  Facts facts(procfs);
  EXPECT_NE(facts.our_namespace("mnt"), 0U);
  EXPECT_EQ(facts.namespace_of(kSelf, "mnt"), facts.our_namespace("mnt"));
  EXPECT_TRUE(facts.has_our_namespace(kSelf, "net"));
  EXPECT_FALSE(facts.has_our_namespace(kSelf, "none"));
}

}  // namespace
}  // namespace stasis::doctor
