#include "doctor/machine.h"

#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/journal.h"
#include "criu/criu.h"
#include "doctor/machine_parts.h"
#include "driver/fake_driver.h"

namespace stasis::doctor {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;

// An obstacle by its id, its severity and a part of what it says.
auto is(ObstacleId id, Severity severity, const std::string& part) {
  return AllOf(Field("id", &Obstacle::id, id), Field("severity", &Obstacle::severity, severity),
               Field("what", &Obstacle::what, HasSubstr(part)));
}

class Machine : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/tmp/machine-XXXXXX";
    top_ = ::mkdtemp(name.data());
    folders_ = {top_ + "/proc", top_ + "/sys", top_ + "/boot", top_ + "/dev"};
    ::setenv("STASIS_STATE_DIR", (top_ + "/state").c_str(), 1);
  }
  void TearDown() override {
    ::unsetenv("STASIS_STATE_DIR");
    fs::remove_all(top_);
    for (const Obstacle& obstacle : out_) {
      // What is not green says what to do.
      EXPECT_EQ(obstacle.remedy.empty(), obstacle.severity == Severity::kGreen) << obstacle.what;
    }
  }

  void write(const std::string& path, const std::string& content) const {
    fs::create_directories(fs::path(top_ + "/" + path).parent_path());
    std::ofstream(top_ + "/" + path) << content;
  }
  void capabilities(std::uint64_t bits) const {
    write("proc/self/status",
          fmt::format("Name:\tx\nCapPrm:\t0\nCapEff:\t{:016x}\nSecc:\t0\n", bits));
  }
  static Gpu gpu(bool mig = false) {
    Gpu out;
    out.name = "NVIDIA H100";
    out.pci_bus_id = "00000000:65:00.0";
    out.memory_total = 80ULL << 30;
    out.memory_used = 3ULL << 30;
    out.mig = mig;
    return out;
  }
  const Obstacle* find(ObstacleId id) const {
    for (const Obstacle& obstacle : out_)
      if (obstacle.id == id) return &obstacle;
    return nullptr;
  }

  std::string top_;
  KernelFolders folders_;
  Obstacles out_;
  Interrupt interrupt_;
  FakeDriver driver_;
};

TEST_F(Machine, releases_of_kernels_are_compared_as_numbers) {
  EXPECT_TRUE(kernel_at_least("6.16.0-1-amd64", 6, 16));
  EXPECT_TRUE(kernel_at_least("7.0", 6, 16));
  EXPECT_TRUE(kernel_at_least("6.18.44-fc-v669", 6, 16));
  EXPECT_FALSE(kernel_at_least("6.9.3", 6, 16));
  EXPECT_FALSE(kernel_at_least("5.20", 6, 16));
  EXPECT_FALSE(kernel_at_least("", 6, 16));
  EXPECT_FALSE(kernel_at_least("6", 6, 0));
}

TEST_F(Machine, a_driver_that_cannot_be_loaded_is_red_with_its_own_words) {
  const Result<std::unique_ptr<Driver>> none =
      fail(ErrorCode::kDriverMissing, "cannot load the CUDA driver: x", "install it");
  MachineOptions options;
  options.criu_path = "/bin/false";
  out_ = examine_machine(none, options, interrupt_);
  ASSERT_FALSE(out_.empty());
  EXPECT_THAT(out_.front(), is("driver", Severity::kRed, "cannot load the CUDA driver: x"));
  EXPECT_EQ(out_.front().remedy, "install it");
  EXPECT_EQ(find("gpus"), nullptr);
  ASSERT_NE(find("criu"), nullptr);
  EXPECT_THAT(*find("criu"), is("criu", Severity::kRed, "/bin/false"));
  EXPECT_EQ(find("criu-check"), nullptr);
}

TEST_F(Machine, an_interrupt_ends_it) {
  interrupt_.request(2);
  const Result<std::unique_ptr<Driver>> none = fail(ErrorCode::kDriverMissing, "x", "y");
  EXPECT_THAT(examine_machine(none, {}, interrupt_), IsEmpty());
}

TEST_F(Machine, without_the_trial_nothing_is_asked_of_any_process) {
  auto driver = std::make_unique<FakeDriver>();
  FakeDriver& fake = *driver;
  fake.all_gpus = {gpu()};
  const Result<std::unique_ptr<Driver>> loaded = std::move(driver);
  MachineOptions options;
  options.criu_path = "/bin/false";
  options.trial = false;
  out_ = examine_machine(loaded, options, interrupt_);
  EXPECT_TRUE(fake.calls().empty());
  EXPECT_EQ(find("trial"), nullptr);
  EXPECT_EQ(find("disk"), nullptr);
  EXPECT_NE(find("host-memory"), nullptr);
}

TEST_F(Machine, an_older_driver_is_yellow) {
  probe_driver(driver_, out_);
  driver_.driver_info.has_device_map = false;
  probe_driver(driver_, out_);
  EXPECT_THAT(out_, ElementsAre(is("driver", Severity::kGreen, "driver 580.0 (CUDA 13.0"),
                                is("driver", Severity::kYellow, "same GPUs only")));
}

TEST_F(Machine, library_and_module_are_compared) {
  driver_.driver_info.driver_version = "580.159.04";
  for (const char* file : {"libcuda.so.580.159.04", "libcuda.so.590.1", "compat/libcuda.so.590.1"})
    write(file, "");
  driver_.driver_info.library = top_ + "/libcuda.so.1";
  fs::create_symlink("libcuda.so.580.159.04", driver_.driver_info.library);
  probe_driver(driver_, out_);
  driver_.driver_info.library = top_ + "/libcuda.so.590.1";
  probe_driver(driver_, out_);
  driver_.driver_info.library = top_ + "/compat/libcuda.so.590.1";
  probe_driver(driver_, out_);
  std::erase_if(out_, [](const Obstacle& obstacle) { return obstacle.id == "driver"; });
  EXPECT_THAT(out_, ElementsAre(is("driver-module", Severity::kGreen, "both 580.159.04"),
                                is("driver-module", Severity::kRed, "590.1"),
                                is("driver-module", Severity::kYellow, "compatibility package")));
}

TEST_F(Machine, gpus_are_listed_and_none_is_red) {
  probe_gpus(driver_, std::vector<Gpu>{}, out_);
  probe_gpus(driver_, fail(ErrorCode::kDriverError, "NVML: x"), out_);
  probe_gpus(driver_, std::vector<Gpu>{gpu(true)}, out_);
  std::erase_if(out_, [](const Obstacle& obstacle) { return obstacle.id == "persistence"; });
  EXPECT_THAT(out_,
              ElementsAre(is("gpus", Severity::kRed, "no GPU"), is("gpus", Severity::kRed, "NVML"),
                          is("gpus", Severity::kGreen, "3.00 GiB of 80.0 GiB in use"),
                          is("mig", Severity::kYellow, "00000000:65:00.0")));
}

TEST_F(Machine, a_daemon_of_mps_is_seen) {
  probe_mps(folders_, out_);
  EXPECT_THAT(out_, IsEmpty());
  std::string rest;
  for (int i = 0; i < 50; ++i)
    rest += " 0";
  write("proc/77/stat", "77 (nvidia-cuda-mps) S 1 1 1" + rest + "\n");
  probe_mps(folders_, out_);
  EXPECT_THAT(out_, ElementsAre(is("mps", Severity::kYellow, "process 77")));
}

TEST_F(Machine, memory_in_use_is_that_of_processes_or_else_of_gpus) {
  EXPECT_EQ(gpu_memory_in_use(driver_, {gpu(), gpu()}), 6ULL << 30);
  driver_.use[Pid{5}] = {{{}, 1000}, {{}, 24}};
  EXPECT_EQ(gpu_memory_in_use(driver_, {gpu(), gpu()}), 1024U);
}

TEST_F(Machine, our_plugin_is_told_from_another) {
  write("ours/cuda_plugin.so", std::string("\0x STASIS_DEVICE_MAP\0", 21));
  write("other/cuda_plugin.so", "cuda-checkpoint");
  probe_plugin({top_ + "/ours"}, out_);
  probe_plugin({top_ + "/other", top_ + "/none"}, out_);
  probe_plugin({top_ + "/none"}, out_);
  EXPECT_THAT(out_, ElementsAre(is("criu-plugin", Severity::kGreen, "is Stasis's"),
                                is("criu-plugin", Severity::kYellow, "not Stasis's"),
                                is("criu-plugin", Severity::kGreen, "no cuda_plugin.so")));
  // What a package has, not only what the source has.
  EXPECT_NE(out_[1].remedy.find("stasis-criu-plugin"), std::string::npos);
}

TEST_F(Machine, capabilities_are_told) {
  const std::uint64_t net = 1ULL << 12;
  const std::uint64_t ptrace = 1ULL << 19;
  const std::uint64_t admin = 1ULL << 21;
  const std::uint64_t resource = 1ULL << 24;
  const std::uint64_t time = 1ULL << 25;
  const std::uint64_t all = ptrace | admin | resource | Criu::capabilities_to_restore();
  const std::map<std::uint64_t, std::pair<Severity, std::string>> cases = {
      {all, {Severity::kGreen, "all capabilities"}},
      {all & ~resource,
       {Severity::kYellow, "lacks CAP_SYS_RESOURCE here: it cannot dump other users"}},
      {all & ~net, {Severity::kYellow, "lacks CAP_NET_ADMIN here: no restores"}},
      // What a container has that was started with --cap-add SYS_ADMIN.
      {all & ~net & ~time,
       {Severity::kYellow, "lacks CAP_NET_ADMIN, CAP_SYS_TIME here: no restores"}},
      {all & ~ptrace, {Severity::kYellow, "lacks CAP_SYS_PTRACE here"}},
      {all & ~admin, {Severity::kRed, "neither CAP_SYS_ADMIN nor"}},
      {0, {Severity::kRed, "may not dump or restore"}}};
  for (const auto& [bits, expected] : cases) {
    capabilities(bits);
    Obstacles out;
    probe_permissions(folders_, out);
    EXPECT_THAT(out, ElementsAre(is("permissions", expected.first, expected.second),
                                 is("yama", Severity::kGreen, "no yama")));
  }
}

TEST_F(Machine, yama_matters_without_the_capability) {
  const std::map<std::pair<int, bool>, Severity> cases = {
      {{0, false}, Severity::kGreen},  {{1, false}, Severity::kYellow},
      {{2, false}, Severity::kYellow}, {{3, false}, Severity::kRed},
      {{1, true}, Severity::kGreen},   {{2, true}, Severity::kGreen},
      {{3, true}, Severity::kRed}};
  for (const auto& [scope, severity] : cases) {
    capabilities(scope.second ? ~0ULL : ~(1ULL << 19));
    write("proc/sys/kernel/yama/ptrace_scope", fmt::format("{}\n", scope.first));
    Obstacles out;
    probe_permissions(folders_, out);
    ASSERT_EQ(out.size(), 2U);
    EXPECT_THAT(out[1], is("yama", severity, fmt::format("ptrace_scope is {}", scope.first)));
  }
}

TEST_F(Machine, the_kernels_configuration_is_read_where_there_is_one) {
  probe_kernel(folders_, "6.1", out_);
  EXPECT_THAT(out_, IsEmpty());
  write("boot/config-6.1", "CONFIG_CHECKPOINT_RESTORE=y\nCONFIG_MEM_SOFT_DIRTY=y\n");
  write("boot/config-6.2",
        "# x\nCONFIG_CHECKPOINT_RESTORE=y\n# CONFIG_MEM_SOFT_DIRTY is not set\n");
  write("boot/config-6.3", "CONFIG_MEM_SOFT_DIRTY=y\n");
  for (const char* release : {"6.1", "6.2", "6.3"})
    probe_kernel(folders_, release, out_);
  EXPECT_THAT(out_, ElementsAre(is("kernel", Severity::kGreen, "6.1"),
                                is("kernel", Severity::kYellow, "SOFT_DIRTY"),
                                is("kernel", Severity::kRed, "CHECKPOINT_RESTORE")));
}

TEST_F(Machine, limits_of_the_kernel_are_told) {
  write("proc/sys/fs/pipe-max-size", "65536\n");
  write("proc/sys/kernel/pid_max", "32768\n");
  probe_limits(folders_, out_);
  ASSERT_NE(find("limit-open-files"), nullptr);
  ASSERT_NE(find("limit-locked-memory"), nullptr);
  ASSERT_EQ(out_.size(), 4U);
  EXPECT_THAT(out_[2], is("limit-pipe-size", Severity::kYellow, "64.0 KiB"));
  EXPECT_THAT(out_[3], is("limit-process-numbers", Severity::kYellow, "32768"));
  write("proc/sys/fs/pipe-max-size", "1048576\n");
  write("proc/sys/kernel/pid_max", "4194304\n");
  Obstacles out;
  probe_limits(folders_, out);
  EXPECT_THAT(out[2], is("limit-pipe-size", Severity::kGreen, "1.00 MiB"));
  EXPECT_THAT(out[3], is("limit-process-numbers", Severity::kGreen, "4194304"));
}

TEST_F(Machine, room_for_processes_is_that_of_the_tightest_limit) {
  write("proc/loadavg", "0.10 0.20 0.30 2/345 12345\n");
  write("proc/sys/kernel/threads-max", "1345\n");
  probe_limits(folders_, out_);
  write("proc/sys/kernel/threads-max", "400\n");
  probe_limits(folders_, out_);
  write("proc/self/mountinfo", "30 22 0:26 / " + top_ + "/cg rw - cgroup2 none rw\n");
  write(fmt::format("proc/{}/cgroup", ::getpid()), "0::/job\n");
  write("cg/job/pids.max", "64\n");
  write("cg/job/pids.current", "60\n");
  probe_limits(folders_, out_);
  write("cg/job/pids.max", "max\n");
  probe_limits(folders_, out_);
  std::erase_if(out_, [](const Obstacle& obstacle) { return obstacle.id != "limit-processes"; });
  EXPECT_THAT(out_, ElementsAre(is("limit-processes", Severity::kGreen, "room for 1000 more"),
                                is("limit-processes", Severity::kYellow, "room for 55 more"),
                                is("limit-processes", Severity::kYellow, "cg/job (64)"),
                                is("limit-processes", Severity::kYellow, "room for 55 more")));
}

TEST_F(Machine, without_time_namespaces_clocks_jump) {
  probe_clock(folders_, out_);
  write("proc/self/ns/time", "");
  probe_clock(folders_, out_);
  EXPECT_THAT(out_, ElementsAre(is("clock", Severity::kYellow, "no time namespaces"),
                                is("clock", Severity::kGreen, "keep their monotonic clock")));
}

TEST_F(Machine, transparent_huge_pages_are_told) {
  probe_huge_pages(folders_, 0, out_);
  EXPECT_THAT(out_, IsEmpty());
  for (const char* words :
       {"[always] madvise never\n", "always [madvise] never\n", "always madvise [never]\n"}) {
    write("sys/kernel/mm/transparent_hugepage/enabled", words);
    probe_huge_pages(folders_, 0, out_);
    write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] deny\n");
  }
  EXPECT_THAT(out_, ElementsAre(is("huge-pages", Severity::kGreen, "pages: always"),
                                is("huge-pages", Severity::kGreen, "for shared memory advise"),
                                is("huge-pages", Severity::kYellow, "pages: never")));
}

TEST_F(Machine, huge_pages_set_aside_matter_where_memory_is_short) {
  write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 2048 kB\nSwapFree: 0 kB\n");
  write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "4\n");
  write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3\n");
  write("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "1\n");
  write("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n");
  for (const std::uint64_t mib : {2U, 6U, 7U})
    probe_huge_pages(folders_, mib << 20, out_);
  const std::string all = "4 pages of 2.00 MiB, 2 free";
  EXPECT_THAT(out_,
              ElementsAre(is("huge-pages-set-aside", Severity::kGreen, all),
                          is("huge-pages-set-aside", Severity::kYellow, all + ": 4.00 MiB that"),
                          is("huge-pages-set-aside", Severity::kGreen, all)));
}

TEST_F(Machine, host_memory_is_held_against_that_of_the_gpus) {
  write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 2048 kB\nSwapFree: 1024 kB\n");
  probe_host_memory(folders_, 3U << 20, out_);
  probe_host_memory(folders_, (3U << 20) + 1, out_);
  EXPECT_THAT(out_, ElementsAre(is("host-memory", Severity::kGreen, "2.00 MiB of memory free"),
                                is("host-memory", Severity::kYellow, "would not fit")));
}

TEST_F(Machine, shared_memory_must_be_a_tmpfs) {
  probe_shared_memory(folders_, out_);
  EXPECT_THAT(out_, ElementsAre(is("shm", Severity::kYellow, "no tmpfs")));
}

TEST_F(Machine, the_disk_is_that_of_the_nearest_directory) {
  write("file", "");
  probe_disk(top_ + "/a/", 0, interrupt_, out_);
  probe_disk(top_, 1ULL << 60, interrupt_, out_);
  probe_disk(top_ + "/file", 0, interrupt_, out_);
  probe_disk("/proc/self", 0, interrupt_, out_);
  probe_disk(top_ + "/a/b/", 0, interrupt_, out_);
  ASSERT_EQ(out_.size(), 5U);
  EXPECT_THAT(out_[0].what, AllOf(HasSubstr("free in " + top_), testing::Not(HasSubstr("/a"))));
  EXPECT_THAT(out_[1].what, HasSubstr("free in " + top_));
  EXPECT_NE(out_[1].severity, Severity::kGreen);
  EXPECT_THAT(out_[2], is("disk", Severity::kRed, "is no directory"));
  EXPECT_THAT(out_[3], is("disk", Severity::kRed, "/proc/self"));
  EXPECT_THAT(out_[4], is("disk", Severity::kRed, top_ + "/a does not exist"));
  EXPECT_EQ(std::distance(fs::directory_iterator(top_), fs::directory_iterator()), 1);
}

TEST_F(Machine, a_file_system_that_reports_no_sizes_is_not_full) {
  if (::mount("ramfs", top_.c_str(), "ramfs", 0, nullptr) != 0)
    GTEST_SKIP() << "no ramfs can be mounted here";
  probe_disk(top_, 1ULL << 60, interrupt_, out_);
  EXPECT_EQ(::umount(top_.c_str()), 0);
  ASSERT_EQ(out_.size(), 1U);
  EXPECT_THAT(out_[0], is("disk", Severity::kGreen, top_ + " does not say how much is free"));
}

TEST_F(Machine, what_killed_operations_left_is_told) {
  probe_state_directory(out_);
  const pid_t child = ::fork();
  if (child == 0) {
    JournalRecord record;
    record.operation = Operation::kSuspend;
    record.root = Pid{12};
    const auto journal = Journal::begin(std::move(record));
    ::_exit(journal ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  probe_state_directory(out_);
  fs::remove_all(top_ + "/state");
  write("state", "");
  probe_state_directory(out_);
  EXPECT_THAT(
      out_, ElementsAre(is("state-directory", Severity::kGreen, top_ + "/state"),
                        is("state-directory", Severity::kYellow, "`stasis suspend` on process 12"),
                        is("state-directory", Severity::kRed, top_ + "/state")));
}

}  // namespace
}  // namespace stasis::doctor
