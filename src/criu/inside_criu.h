// What a library of ours does in a criu that we start (plugins/inside_criu/).
//
// It keeps pages of processes from it which the tool saves itself: they are left out of what the
// kernel tells criu of /proc/PID/pagemap, and the processes keep them. And it keeps criu from
// threads that have AMX tiles in use, which criu would take from them. Owns a shared mapping;
// moves, never copies. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abi/inside_criu.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis {

class InsideCriu {
 public:
  // Its file, for LD_PRELOAD. kNotSupported where it is not installed.
  static Result<std::string> find_library();
  // Of no page yet. kOutOfHostMemory, kIo; kNotSupported as above.
  static Result<InsideCriu> create();

  const UniqueFd& descriptor() const { return file_; }
  const std::string& library() const { return library_; }

  // Whether the criu that was started with them reads them: what cannot load the library (a static
  // program, one with rights of its own) does not. Once criu has sent a message.
  bool is_heard() const;
  // Before criu goes on: it waits for hide() or hide_none() where it would look at the pages of a
  // process, or until this process has ended.
  void await();
  // Once, before criu looks at a process or after await(); in any order. False if there are more
  // than there is room for, and then none is hidden.
  bool hide(std::vector<inside_criu::Range> ranges);
  void hide_none();
  // Whether criu has looked at pages of a process since: it has then stopped all that it dumps.
  bool is_asked() const;
  // A thread with AMX tiles in use, if criu has come to one: its dump fails then, and the thread
  // was not touched.
  std::optional<Tid> thread_with_tiles() const;
  // Bytes that criu has asked for and not seen, so far.
  std::uint64_t hidden_bytes() const;

 private:
  struct Unmap {
    void operator()(inside_criu::Table* table) const;
  };
  InsideCriu(UniqueFd file, inside_criu::Table* table, std::string library)
      : file_(std::move(file)), table_(table), library_(std::move(library)) {}
  UniqueFd file_;
  std::unique_ptr<inside_criu::Table, Unmap> table_;
  std::string library_;
};

}  // namespace stasis
