// Who holds how much of which simulated GPU, kept in files, so that it can be seen from outside the
// processes and survives none of them.
//
// One folder per GPU under Config::dir, named by its UUID, with
//   owner-NONCE        one per process that uses the GPU: who it is and the objects it holds
//   mem-NONCE-ID       one per allocation: its content, and a last page that says what it is
//   lock               serialises changes between processes
// A process holds a POSIX record lock on its owner file for as long as it lives: it ends with the
// process however that dies, is not inherited by fork, and tells its holder's PID in the reader's
// own PID namespace. An owner file without the lock is a dead process's and is swept with its
// memory. Memory that several processes hold counts once for the GPU (objects have ids).
//
// Threads: a Holding and everything that changes files is used by one thread at a time (the memory
// manager's mutex, or the restore thread while all others are outside the driver); usage() may be
// called by anyone at any time and takes no lock.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sim/config.h"

namespace stasis::sim {

// An owner of a descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~Fd() { reset(); }
  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release() {
    int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

struct ObjectId {
  std::uint64_t owner = 0;  // nonce of the process that created it
  std::uint64_t id = 0;
  bool operator==(const ObjectId&) const = default;
};

// What its creator asked for.
struct ObjectKind {
  std::uint32_t handle_types = 0;
  std::uint32_t usage = 0;  // CU_MEM_CREATE_USAGE_*
  bool host = false;        // memory of the host's, CU_MEM_LOCATION_TYPE_HOST_NUMA
  bool multicast = false;   // an object of cuMulticastCreate
};

// The last page of a memory file, so that an importer knows what it was handed.
struct ObjectTrailer {
  char magic[16];
  ObjectId id;
  std::uint64_t size;
  cuda::CUuuid gpu;
  ObjectKind kind;
};

struct Usage {
  struct Process {
    pid_t pid = 0;  // in the reader's PID namespace; 0 if it cannot be seen from there
    std::string name;
    std::uint64_t bytes = 0;
  };
  std::uint64_t used = 0;
  std::vector<Process> processes;
};

// Reads which processes use a GPU. A folder that does not exist means none.
Usage usage(const std::string& dir, const cuda::CUuuid& gpu);

// Removes what dead processes have left of a GPU; false if the folder cannot be made or locked.
bool sweep(const std::string& dir, const cuda::CUuuid& gpu);

// This process's part of one GPU.
class Holding {
 public:
  Holding(const std::string& dir, const GpuSpec& gpu);
  ~Holding();
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

  // False, with errno, if the folder cannot be used. Sweeps.
  bool open();
  bool is_open() const { return static_cast<bool>(file_); }
  void close();  // lets go of everything of this GPU: the memory files too
  enum class Outcome { kOk, kFull, kFailed };
  // Creates an object's file if it fits the GPU, and counts it.
  Outcome create(std::uint64_t size, ObjectKind kind, ObjectId& id, Fd& file);
  // Counts an object of another process's that `file` refers to, and gives it a name of our own.
  Outcome adopt(const ObjectTrailer& object, int file);
  Fd reopen(const ObjectId& id) const;
  void drop(const ObjectId& id);
  // True if another live process holds the object too.
  bool shared(const ObjectId& id) const;
  std::uint64_t bytes() const;
  const GpuSpec& gpu() const { return gpu_; }

 private:
  std::string folder() const;
  void forget();
  std::string path(const ObjectId& id) const;
  bool count(const ObjectId& id, std::uint64_t size);

  std::string dir_;
  GpuSpec gpu_;
  Fd file_;
  std::vector<std::pair<ObjectId, std::uint64_t>> objects_;  // a free slot has size 0
  // Those of others that had no name any more when they came to us.
  std::vector<std::pair<ObjectId, Fd>> nameless_;
};

// A GPU that several programs use is switched between them when one makes a context there. Notes
// that, and tells when another process last did: CLOCK_REALTIME in ns, 0 if none has.
void note_switch(const std::string& dir, const cuda::CUuuid& gpu);
std::int64_t last_switch(const std::string& dir, const cuda::CUuuid& gpu);

// What a descriptor handed to us refers to; false if it is no memory of a simulated GPU.
bool read_trailer(int file, ObjectTrailer& out);
// The file of another process's object, by its id; needs no help of that process.
Fd open_object(const std::string& dir, const cuda::CUuuid& gpu, const ObjectId& id);
// In a forked child: closes the descriptors of this process's owner files and touches nothing else.
void forget_own_files();
// A new random name for this process, at first use and after it may have been copied (fork, CRIU).
void renew_nonce();
std::uint64_t random_id();

}  // namespace stasis::sim
