#include "proc/held_files.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>

#include <gtest/gtest.h>

#include "base/fd.h"
#include "proc/procfs.h"
#include "tests/fakes/child.h"
#include "tests/fakes/served_file.h"

namespace stasis::proc {
namespace {

using fakes::Child;

struct HeldPlace {
  pid_t server = 0;
  std::atomic<int> state = 0;  // 1: all is made; 2: that cannot be here
};

constexpr std::size_t kPage = 4096;
constexpr std::size_t kApart = 64 * kPage;  // more than the kernel reads ahead

// A connection of a process to itself, of which it has one end.
int connected_stream() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  const int stream = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof name;
  auto* const at = reinterpret_cast<sockaddr*>(&name);
  (void)::bind(listener, at, size);
  (void)::listen(listener, 1);
  (void)::getsockname(listener, at, &size);
  (void)::connect(stream, at, size);
  (void)::accept(listener, nullptr, nullptr);
  return stream;
}

// With the beginning of a datagram that is not sent yet: what follows is copied under the lock.
int begun_datagram() {
  const int out = ::socket(AF_INET, SOCK_DGRAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(9);
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  (void)::connect(out, reinterpret_cast<sockaddr*>(&name), sizeof name);
  (void)::send(out, "x", 1, MSG_MORE);
  return out;
}

int ready_epoll(int readable) {
  const int out = ::epoll_create1(0);
  epoll_event event{};
  event.events = EPOLLIN;
  (void)::epoll_ctl(out, EPOLL_CTL_ADD, readable, &event);
  return out;
}

// A process that has the file which `make` makes, and one beside it that runs `hold` with that file
// and a page which does not come.
class Holder {
 public:
  template <class Make, class Hold>
  Holder(Make make, Hold hold)
      : place_(static_cast<HeldPlace*>(::mmap(nullptr, sizeof(HeldPlace), PROT_READ | PROT_WRITE,
                                              MAP_SHARED | MAP_ANONYMOUS, -1, 0))),
        child_([this, make, hold] {
          const int file = make();
          const int served = fakes::open_served_file(place_->server);
          void* const at =
              ::mmap(nullptr, fakes::kServedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, served, 0);
          if (served < 0 || at == MAP_FAILED) {
            place_->state = 2;
            ::pause();
          }
          const pid_t holder = ::fork();
          if (holder == 0) {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            hold(file, static_cast<char*>(at) + kApart);
            ::_exit(0);
          }
          // It waits for its server, in the middle of the call.
          while (read_file(AT_FDCWD, "/proc/" + std::to_string(holder) + "/wchan", 64)
                     .value_or("request_wait_answer") != "request_wait_answer")
            ::usleep(10000);
          place_->state = 1;
          for (;;)
            ::pause();
        }) {}
  ~Holder() {
    if (place_->server > 0) ::kill(place_->server, SIGKILL);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  bool is_made() const {
    for (int i = 0; i < 1000 && place_->state == 0; ++i)
      ::usleep(10000);
    return place_->state == 1;
  }
  Pid pid() const { return child_.pid(); }

 private:
  HeldPlace* place_;
  Child child_;
};

bool never() { return false; }

constexpr HeldFiles::Limits kQuick{std::chrono::milliseconds(200), std::chrono::milliseconds(300)};

std::string held_of(const Holder& holder) {
  const auto files = ProcFs().open_files(holder.pid());
  if (!files) return "no files";
  const auto begun = std::chrono::steady_clock::now();
  const auto held = HeldFiles(kQuick).find({{holder.pid(), &*files}}, never);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(8));
  return held ? held->file.path.substr(0, held->file.path.find_last_of(":[")) : "none";
}

TEST(HeldFilesTest, APipeIntoWhichAProcessWritesFromAPageThatDoesNotCome) {
  const Holder holder(
      [] {
        std::array<int, 2> ends{};
        return ::pipe(ends.data()) == 0 ? ends[1] : -1;
      },
      [](int file, char* page) { (void)!::write(file, page, kPage); });
  if (!holder.is_made()) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  EXPECT_EQ(held_of(holder), "pipe:");
}

TEST(HeldFilesTest, AConnectionIntoWhichAProcessSendsFromAPageThatDoesNotCome) {
  const Holder holder(connected_stream,
                      [](int file, char* page) { (void)::send(file, page, 2 * kPage, 0); });
  if (!holder.is_made()) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  EXPECT_EQ(held_of(holder), "socket:");
}

TEST(HeldFilesTest, ADatagramToWhichAProcessAddsFromAPageThatDoesNotCome) {
  const Holder holder(begun_datagram,
                      [](int file, char* page) { (void)::send(file, page, 8, MSG_MORE); });
  if (!holder.is_made()) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  EXPECT_EQ(held_of(holder), "socket:");
}

TEST(HeldFilesTest, APipeWithAName) {
  const std::string name = "/tmp/stasis-held-" + std::to_string(::getpid());
  const Holder holder(
      [name] {
        (void)::mkfifo(name.c_str(), 0600);
        const int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
        ::unlink(name.c_str());
        return file;
      },
      [](int file, char* page) { (void)!::write(file, page, kPage); });
  if (!holder.is_made()) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  EXPECT_EQ(held_of(holder), name + " (deleted)");
}

TEST(HeldFilesTest, ASocketForWhichAProcessSetsAFilterFromAPageThatDoesNotCome) {
  const Holder holder([] { return ::socket(AF_UNIX, SOCK_STREAM, 0); },
                      [](int file, char* page) {
                        const sock_fprog program{1, reinterpret_cast<sock_filter*>(page)};
                        (void)::setsockopt(file, SOL_SOCKET, SO_ATTACH_FILTER, &program,
                                           sizeof program);
                      });
  if (!holder.is_made()) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  EXPECT_EQ(held_of(holder), "socket:");
}

TEST(HeldFilesTest, ASocketOfWhichAProcessReadsADatagramIntoAPageThatDoesNotCome) {
  const Holder holder(
      [] {
        std::array<int, 2> ends{};
        (void)::socketpair(AF_UNIX, SOCK_DGRAM, 0, ends.data());
        (void)::send(ends[1], "x", 1, 0);
        return ends[0];
      },
      [](int file, char* page) { (void)::recv(file, page, kPage, 0); });
  if (!holder.is_made()) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  EXPECT_EQ(held_of(holder), "socket:");
}

TEST(HeldFilesTest, AnEpollThatTellsAProcessEventsInAPageThatDoesNotCome) {
  const Holder holder(
      [] {
        std::array<int, 2> ends{};
        (void)!::pipe(ends.data());
        (void)!::write(ends[1], "x", 1);
        return ready_epoll(ends[0]);
      },
      [](int file, char* page) {
        (void)::epoll_wait(file, reinterpret_cast<epoll_event*>(page), 1, -1);
      });
  if (!holder.is_made()) GTEST_SKIP() << "no FUSE here, no user namespaces, or not root";
  EXPECT_EQ(held_of(holder), "anon_inode:");
}

TEST(HeldFilesTest, FilesThatAnswerAreNotHeld) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const std::array<int, 3> others = {connected_stream(), begun_datagram(), ready_epoll(ends[0])};
  const Pid self{::getpid()};
  const auto files = ProcFs().open_files(self);
  ASSERT_TRUE(files);
  EXPECT_FALSE(HeldFiles().find({{self, &*files}}, never));
  for (const int file : others)
    ::close(file);
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace
}  // namespace stasis::proc
