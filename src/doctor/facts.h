// What the parts of find_undumpable() ask of the same processes, asked once for all of them.
//
// For one search: what is asked again is what was seen first, as if all had been seen at that time.
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/interrupt.h"
#include "proc/procfs.h"

namespace stasis::doctor {

class Facts {
 public:
  explicit Facts(const proc::ProcFs& procfs, const Interrupt* interrupt = nullptr)
      : procfs_(procfs), interrupt_(interrupt) {}

  const proc::ProcFs& procfs() const { return procfs_; }
  // A stop was requested: what was found by then is of no use, and a process may have half a
  // million open files to look at.
  bool is_over() const { return interrupt_ != nullptr && interrupt_->requested(); }
  // Null if it cannot be read, or all is over.
  std::shared_ptr<const std::vector<proc::OpenFile>> open_files(Pid pid);
  std::shared_ptr<const std::vector<proc::Mapping>> mappings(Pid pid);
  std::vector<Tid> threads(Pid pid);
  // The number of a process's namespace ("net"), or of our own; 0 if it cannot be seen.
  ino_t namespace_of(Pid pid, std::string_view kind);
  ino_t our_namespace(std::string_view kind);
  // Does the process live in our namespace of that kind? False if it cannot be seen.
  bool has_our_namespace(Pid pid, std::string_view kind);

 private:
  // A hostile tree can have gigabytes of them: beyond so much each is read anew.
  static constexpr std::size_t kMostBytes = 64U << 20;

  template <class Fact>
  using Known = std::map<Pid, std::shared_ptr<const std::vector<Fact>>>;
  template <class Fact, class Read>
  std::shared_ptr<const std::vector<Fact>> ask(Known<Fact>& known, Pid pid, Read read);
  ino_t namespace_at(std::string_view process, std::string_view kind);

  const proc::ProcFs& procfs_;
  const Interrupt* interrupt_;
  std::mutex mutex_;
  std::size_t bytes_ = 0;
  Known<proc::OpenFile> files_;
  Known<proc::Mapping> mappings_;
  Known<Tid> threads_;
  std::map<std::pair<std::string, std::string>, ino_t, std::less<>> namespaces_;
};

}  // namespace stasis::doctor
