#include "proc/in_namespace.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "tests/fakes/child.h"

namespace stasis::proc {
namespace {

TEST(InNamespace, WorkIsDoneThereAndTheCallerStaysHere) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root: namespaces";
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const fakes::Child child([&] {
    (void)!::write(pipe[1], ::unshare(CLONE_NEWNET | CLONE_NEWIPC) == 0 ? "y" : "n", 1);
    ::pause();
  });
  char answer = 0;
  ASSERT_EQ(::read(pipe[0], &answer, 1), 1);
  ::close(pipe[0]);
  ::close(pipe[1]);
  if (answer != 'y') GTEST_SKIP() << "there may be no namespaces";
  const auto number_of = [](const char* path) {
    struct stat info {};
    return ::stat(path, &info) == 0 ? info.st_ino : 0;
  };
  for (const auto& [kind, name] :
       {std::pair(Namespace::kNetwork, "net"), std::pair(Namespace::kIpc, "ipc")}) {
    const std::string ours = std::string("/proc/thread-self/ns/") + name;
    const std::string theirs = "/proc/" + std::to_string(child.pid().value) + "/ns/" + name;
    const ino_t before = number_of(ours.c_str());
    const ino_t wanted = number_of(theirs.c_str());
    ASSERT_NE(before, wanted);
    ino_t seen = 0;
    const auto look = [&] { seen = number_of(ours.c_str()); };
    EXPECT_TRUE(in_namespace(child.pid(), kind, look));
    EXPECT_EQ(seen, wanted);
    seen = 0;
    EXPECT_TRUE(in_namespace(child.pid(), kind, look, wanted));
    EXPECT_EQ(seen, wanted);
    EXPECT_EQ(number_of(ours.c_str()), before);
    seen = 0;
    EXPECT_FALSE(in_namespace(child.pid(), kind, look, before)) << "it is another one";
    EXPECT_EQ(seen, 0U);
  }
}

TEST(InNamespace, OfAProcessThatIsNotThereNothingIsDone) {
  bool done = false;
  EXPECT_FALSE(in_namespace(Pid{1 << 30}, Namespace::kIpc, [&] { done = true; }));
  EXPECT_FALSE(done);
}

}  // namespace
}  // namespace stasis::proc
