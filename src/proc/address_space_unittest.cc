#include "proc/address_space.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "proc/process_file.h"
#include "proc/procfs.h"
#include "proc/thread_state.h"
#include "tests/fakes/child.h"
#include "tests/fakes/served_file.h"

namespace stasis::proc {
namespace {

using fakes::Child;

template <class Condition>
bool wait_for(const Condition& condition) {
  for (int i = 0; i < 10000; ++i) {
    if (condition()) return true;
    ::usleep(1000);
  }
  return false;
}

std::uint64_t address_of(const void* at) { return reinterpret_cast<std::uint64_t>(at); }

class AddressSpaceTest : public ::testing::Test {
 protected:
  AddressSpaceTest()
      : go_(static_cast<std::atomic<int>*>(
            ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~AddressSpaceTest() override { ::munmap(go_, 4096); }

  // Waits for the word, then becomes another program, which sleeps.
  void become_another() const {
    while (go_->load() == 0)
      ::usleep(500);
    const std::array<const char*, 3> sleep{"sleep", "1000", nullptr};
    ::execvp(sleep[0], const_cast<char* const*>(sleep.data()));
  }
  static bool sleeps(Pid pid) {
    const auto info = ProcFs().process(pid);
    return info && info->comm == "sleep";
  }

  std::atomic<int>* go_;  // shared with the child
};

TEST_F(AddressSpaceTest, ReadsAndWritesWhatItWasOpenedFor) {
  std::vector<char> memory(100000, 'a');
  const Child child;
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space) << space.error().to_string();
  EXPECT_TRUE(space->check_current());
  const std::vector<char> other(100000, 'b');
  ASSERT_TRUE(space->write(address_of(memory.data()), other.data(), other.size()));
  std::vector<char> got(100000);
  ASSERT_TRUE(space->read(address_of(memory.data()), got.data(), got.size()));
  EXPECT_EQ(got, other);
  EXPECT_EQ(memory[0], 'a') << "it is the child's memory, not ours";
  const auto nowhere = space->read(8, got.data(), 8);
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, ErrorCode::kIo);
}

TEST_F(AddressSpaceTest, DiesWithItsProgram) {
  std::array<char, 64> memory{};
  const Child child([this] { become_another(); });
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  go_->store(1);
  ASSERT_TRUE(wait_for([&] { return sleeps(child.pid()); }));
  EXPECT_FALSE(space->check_current());
  char byte = 0;
  for (const auto& result :
       {space->read(address_of(memory.data()), &byte, 1),
        space->write(address_of(memory.data()), &byte, 1), space->check_current()}) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kProcessGone);
  }
  auto other = AddressSpace::open(child.pid());
  ASSERT_TRUE(other);
  EXPECT_TRUE(other->check_current());
}

// The address space lives on with who shares it, so that reads still work: what they reach is the
// old one, and the process is said to have left it.
TEST_F(AddressSpaceTest, IsNotCurrentWhenAnotherKeepsItAlive) {
  static std::array<char, 64> memory{};
  const Child child([this] {
    static std::array<char, 65536> stack;
    const auto stay = [](void*) -> int {
      for (;;)
        ::pause();
    };
    // Ends with the test: its parent's end is the end of its reason to be.
    if (::clone(stay, stack.data() + stack.size(), CLONE_VM | SIGCHLD, nullptr) < 0) ::_exit(1);
    memory[0] = 'o';
    go_->store(2);
    while (go_->load() != 1)
      ::usleep(500);
    become_another();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() == 2; }));
  const auto children = ProcFs().tree(child.pid());
  ASSERT_TRUE(children && children->size() == 2);
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  go_->store(1);
  ASSERT_TRUE(wait_for([&] { return sleeps(child.pid()); }));
  char byte = 0;
  EXPECT_TRUE(space->read(address_of(memory.data()), &byte, 1));
  EXPECT_EQ(byte, 'o');
  EXPECT_FALSE(space->check_current());
  ::kill((*children)[1].pid.value, SIGKILL);
}

TEST_F(AddressSpaceTest, OfAProcessThatHasEndedIsGone) {
  const Child child;
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  child.become_zombie();
  EXPECT_FALSE(space->check_current());
  char byte = 0;
  const auto read = space->read(address_of(&byte), &byte, 1);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kProcessGone);
  EXPECT_FALSE(AddressSpace::open(child.pid()));
}

// While the kernel frees its memory it has none, and is no zombie yet.
TEST_F(AddressSpaceTest, OfAProcessThatIsEndingIsGone) {
  const Child child([this] {
    constexpr std::size_t kSize = 256 << 20;
    void* memory = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    go_->store(memory == MAP_FAILED ? 2 : 1);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([this] { return go_->load() != 0; }));
  ASSERT_EQ(go_->load(), 1) << "no memory";
  ASSERT_EQ(::kill(child.pid().value, SIGKILL), 0);
  bool gone = false;
  for (int i = 0; !gone && i < 100000; ++i) {
    const auto space = AddressSpace::open(child.pid());
    if (space) continue;
    ASSERT_EQ(space.error().code, ErrorCode::kProcessGone) << space.error().to_string();
    const auto info = ProcFs().process(child.pid());
    gone = info && info->has_ended();
  }
  EXPECT_TRUE(gone);
}

// Large pieces go another way, with the rights of the target's user.
TEST_F(AddressSpaceTest, LargePiecesOfAnotherUsersMemoryGoAndOurRightsAreBack) {
  if (::getuid() != 0) GTEST_SKIP() << "not root";
  std::vector<char> memory(std::size_t{8} << 20, 'a');
  constexpr unsigned kUser = 65534;
  const Child child([&] {
    if (::setresgid(kUser, kUser, kUser) != 0 || ::setresuid(kUser, kUser, kUser) != 0) ::_exit(1);
    ::prctl(PR_SET_DUMPABLE, 1);
    go_->store(2);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() == 2; }));
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  const std::vector<char> other(memory.size(), 'b');
  ASSERT_TRUE(space->write(address_of(memory.data()), other.data(), other.size()));
  std::vector<char> got(memory.size());
  ASSERT_TRUE(space->read(address_of(memory.data()), got.data(), got.size()));
  EXPECT_EQ(got, other);
  EXPECT_EQ(::getuid(), 0U);
  EXPECT_EQ(::getgid(), 0U);
  EXPECT_NE(ProcFs().effective_capabilities().value_or(0) & (1 << CAP_SYS_PTRACE), 0U);
}

// process_vm_readv(2) and its like would wait for the program, and heed SIGKILL alone.
TEST_F(AddressSpaceTest, DoesNotWaitForPagesThatTheProgramProvides) {
  constexpr std::size_t kSize = std::size_t{1} << 20;
  const auto map = [] {
    return static_cast<char*>(
        ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  };
  char* const missing = map();
  char* const kept = map();
  char* const plain = map();
  const Child child([&] {
    ::alarm(20);  // with its end the waiting would end
    const int fd = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
    uffdio_api api{.api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP, .ioctls = 0};
    uffdio_register all{{address_of(missing), kSize}, UFFDIO_REGISTER_MODE_MISSING, 0};
    uffdio_register some{{address_of(kept), kSize}, UFFDIO_REGISTER_MODE_WP, 0};
    uffdio_writeprotect from_now{{address_of(kept), kSize}, UFFDIO_WRITEPROTECT_MODE_WP};
    std::fill_n(kept, kSize, 'k');
    const bool done = fd >= 0 && ::ioctl(fd, UFFDIO_API, &api) == 0 &&
                      ::ioctl(fd, UFFDIO_REGISTER, &all) == 0 &&
                      ::ioctl(fd, UFFDIO_REGISTER, &some) == 0 &&
                      ::ioctl(fd, UFFDIO_WRITEPROTECT, &from_now) == 0;
    go_->store(done ? 2 : 3);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() >= 2; }));
  if (go_->load() == 3) GTEST_SKIP() << "no userfaultfd here, or none for the kernel's faults";
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  std::vector<char> piece(kSize, 'w');
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(space->read(address_of(missing), piece.data(), kSize));
  EXPECT_FALSE(space->write(address_of(missing), piece.data(), kSize));
  EXPECT_FALSE(space->write(address_of(kept), piece.data(), kSize));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  // What is there can be read, and memory that is the kernel's to provide goes as before.
  EXPECT_TRUE(space->write(address_of(plain), piece.data(), kSize));
  EXPECT_TRUE(space->read(address_of(kept), piece.data(), kSize));
  EXPECT_EQ(piece[kSize / 2], 'k');
  for (char* const one : {missing, kept, plain})
    ::munmap(one, kSize);
}

// What the kernel refuses to the target's user it refuses to who moves memory with his rights.
TEST_F(AddressSpaceTest, WithLesserRightsAMorePowerfulProgramIsNotRead) {
  if (::getuid() != 0) GTEST_SKIP() << "not root";
  constexpr unsigned kUser = 65534;
  constexpr std::size_t kSize = std::size_t{1} << 20;
  std::vector<char> memory(kSize, 's');
  const Child child([&] {
    if (::setresgid(kUser, kUser, kUser) != 0 || ::setresuid(kUser, kUser, 0) != 0) ::_exit(1);
    ::prctl(PR_SET_DUMPABLE, 1);
    go_->store(2);
    while (go_->load() != 1)
      ::usleep(200);
    // As after a setuid program's start.
    if (::setresuid(kUser, 0, 0) != 0) ::_exit(1);
    go_->store(3);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() == 2; }));
  const Child plain([&] {
    if (::setresgid(kUser, kUser, kUser) != 0 || ::setresuid(kUser, kUser, kUser) != 0) ::_exit(1);
    ::prctl(PR_SET_DUMPABLE, 1);
    go_->store(4);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() == 4; }));
  go_->store(1);
  ASSERT_TRUE(wait_for([&] { return go_->load() == 3; }));
  const auto rights = LesserRights::of(plain.pid());
  const auto address = reinterpret_cast<std::uint64_t>(memory.data());
  const auto reads = [&](Pid pid) {
    std::vector<char> to(kSize, '-');
    const auto done = rights.move(ServedPages::Access::kRead, pid, address, to.data(), kSize);
    return done == kSize && to == memory;
  };
  EXPECT_FALSE(reads(child.pid()));
  EXPECT_TRUE(reads(plain.pid()));
  std::vector<char> other(kSize, 'w');
  const auto writes = [&](Pid pid) {
    return rights.move(ServedPages::Access::kWrite, pid, address, other.data(), kSize);
  };
  EXPECT_EQ(writes(plain.pid()), kSize);
  EXPECT_EQ(writes(child.pid()), 0U);
  EXPECT_FALSE(reads(plain.pid()));
}

// Root has all rights in a namespace that it has made, whatever it gives up.
TEST_F(AddressSpaceTest, OfAnotherUserNamespaceNothingIsMovedByNumber) {
  if (::getuid() != 0) GTEST_SKIP() << "not root";
  constexpr std::size_t kSize = std::size_t{1} << 20;
  std::vector<char> memory(kSize, 's');
  const Child child([&] {
    if (::unshare(CLONE_NEWUSER) != 0) ::_exit(1);
    go_->store(2);
    while (go_->load() != 3)
      ::usleep(200);
    if (::setresgid(1000, 1000, 1000) != 0 || ::setresuid(1000, 1000, 1000) != 0) ::_exit(1);
    ::prctl(PR_SET_DUMPABLE, 1);
    go_->store(4);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() == 2; }));
  for (const char* map : {"uid_map", "gid_map"})
    std::ofstream(fmt::format("/proc/{}/{}", child.pid().value, map))
        << "0 100000 65536" << std::flush;
  go_->store(3);
  ASSERT_TRUE(wait_for([&] { return go_->load() == 4; }));
  std::vector<char> to(kSize);
  const auto address = reinterpret_cast<std::uint64_t>(memory.data());
  EXPECT_EQ(LesserRights::of(child.pid())
                .move(ServedPages::Access::kRead, child.pid(), address, to.data(), kSize),
            0U);
  const auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  EXPECT_TRUE(space->read(address, to.data(), kSize));
  EXPECT_EQ(to, memory);
}

// A page that its server holds back is waited for in the kernel, and no signal ends that.
TEST_F(AddressSpaceTest, APageThatAnotherUsersProgramHoldsBackIsNotWaitedFor) {
  struct Place {
    pid_t server;
    std::uint64_t address;
  };
  auto* place = static_cast<Place*>(
      ::mmap(nullptr, sizeof(Place), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(place, MAP_FAILED);
  const Child child([&] {
    const int file = fakes::open_served_file(place->server);
    void* at = ::mmap(nullptr, fakes::kServedBytes, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
    if (file < 0 || at == MAP_FAILED) {
      go_->store(3);
      ::pause();
    }
    // In this order: the kernel would refuse a page that it has not begun to read to a user whom
    // the server's namespace does not know.
    if (::fork() == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::_exit(*static_cast<volatile char*>(at));
    }
    ::usleep(200000);
    place->address = address_of(at);
    go_->store(2);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() >= 2; }));
  if (go_->load() == 3) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  auto space = AddressSpace::open(child.pid());
  ASSERT_TRUE(space);
  const fakes::ServerEnd end(place->server);
  char byte = 0;
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(space->read(place->address, &byte, 1));
  EXPECT_FALSE(space->write(place->address, &byte, 1));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

// A look into its memory waits for a file system that it serves itself.
TEST_F(AddressSpaceTest, OneThatKeepsItsMappingsLockedIsNotWaitedForLong) {
  if (::getuid() != 0) GTEST_SKIP() << "not root";
  auto* const server = static_cast<pid_t*>(
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(server, MAP_FAILED);
  const auto own = ProcFs().mappings(Pid{::getpid()});
  ASSERT_TRUE(own);
  const auto code = std::find_if(own->begin(), own->end(), [](const Mapping& one) {
    return one.permissions == "r-xp" && one.path.starts_with("/");
  });
  ASSERT_NE(code, own->end());
  const Mapping mapping = *code;  // the child has the same one
  ASSERT_FALSE(MappedFile(Pid{::getpid()}, mapping).link().empty());
  const Child child([&] {
    go_->store(fakes::keep_mappings_locked(*server) ? 2 : 3);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() >= 2; }));
  if (go_->load() == 3) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  const fakes::ServerEnd end(*server, 30);
  const ProcFs procfs;
  const bool is_kept = wait_for([&] {
    const auto threads = procfs.threads(child.pid());
    return std::any_of(threads.begin(), threads.end(), [&](Tid thread) {
      const auto info = procfs.thread(child.pid(), thread);
      return info && info->state == 'D';
    });
  });
  if (!is_kept) GTEST_SKIP() << "this kernel keeps nothing locked meanwhile";
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  ProcessText smaps(child.pid(), "smaps");
  EXPECT_FALSE(std::getline(smaps, text));
  const auto variables = procfs.environment(child.pid());
  ASSERT_FALSE(variables);
  EXPECT_EQ(variables.error().code, ErrorCode::kBusy);
  const auto details = procfs.details(child.pid());
  ASSERT_TRUE(details);
  EXPECT_NE(details->uid, ::getuid());
  const auto space = AddressSpace::open(child.pid());
  ASSERT_FALSE(space);
  EXPECT_EQ(space.error().code, ErrorCode::kBusy);
  EXPECT_TRUE(may_trace(child.pid()));
  EXPECT_EQ(memory_policy(child.pid(), Tid{child.pid().value}), std::nullopt);
  EXPECT_TRUE(MappedFile(child.pid(), mapping).link().empty());
  // All of them together.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

// The kernel tells nearly nothing of a process while it executes.
TEST_F(AddressSpaceTest, OneThatExecutesForEverIsNotWaitedForLong) {
  auto* const server = static_cast<pid_t*>(
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(server, MAP_FAILED);
  const Child child([&] {
    fakes::execute_held_up(*server, *go_);
    go_->store(3);
    for (;;)
      ::pause();
  });
  ASSERT_TRUE(wait_for([&] { return go_->load() >= 2; }));
  if (go_->load() == 3) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  const fakes::ServerEnd end(*server, 30);
  ::usleep(500000);
  const auto start = std::chrono::steady_clock::now();
  const ProcFs procfs;
  EXPECT_TRUE(procfs.all());
  EXPECT_EQ(AddressSpace::open(child.pid()).error().code, ErrorCode::kBusy);
  // Before Linux 6.18 it tells where it is.
  if (!procfs.process(child.pid())) {
    const auto tree = procfs.tree(Pid{::getpid()});
    ASSERT_FALSE(tree);
    EXPECT_EQ(tree.error().code, ErrorCode::kBusy);
    const auto held = procfs.list().value().held;
    ASSERT_EQ(held.size(), 1U);
    EXPECT_EQ(held[0].pid, child.pid());
    EXPECT_EQ(held[0].parent.value, ::getpid());
    EXPECT_FALSE(held[0].comm.empty());
  }
  EXPECT_EQ(pid_namespace_of(child.pid()), 0U);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

}  // namespace
}  // namespace stasis::proc
