// Pages of processes that a criu started by us is not to save: the tool saves them itself.
//
// A library that is loaded into criu (plugins/criu_pages/) leaves them out of what the kernel tells
// criu of /proc/PID/pagemap. The processes keep the pages. Owns a shared mapping; moves, never
// copies. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "abi/hidden_pages.h"
#include "base/fd.h"
#include "base/result.h"

namespace stasis {

class HiddenPages {
 public:
  // Of no page yet. kOutOfHostMemory, kIo; kNotSupported where the library is not installed.
  static Result<HiddenPages> create();

  const UniqueFd& descriptor() const { return file_; }
  const std::string& library() const { return library_; }

  // Whether the criu that was started with them reads them: what cannot load the library (a static
  // program, one with rights of its own) does not. Once criu has sent a message.
  bool is_heard() const;
  // Once, before criu looks at a process; in any order. False if there are more than there is room
  // for, and then none is hidden.
  bool hide(std::vector<hidden_pages::Range> ranges);
  // Whether criu has looked at pages of a process since: it has then stopped all that it dumps.
  bool is_asked() const;
  // Bytes that criu has asked for and not seen, so far.
  std::uint64_t hidden_bytes() const;

 private:
  struct Unmap {
    void operator()(hidden_pages::Table* table) const;
  };
  HiddenPages(UniqueFd file, hidden_pages::Table* table, std::string library)
      : file_(std::move(file)), table_(table), library_(std::move(library)) {}
  UniqueFd file_;
  std::unique_ptr<hidden_pages::Table, Unmap> table_;
  std::string library_;
};

}  // namespace stasis
