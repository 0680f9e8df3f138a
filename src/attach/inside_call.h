// A function that runs inside a target, on a thread of ours, while the program runs on.
//
// One thread of the program makes a few system calls for the tool (proc/remote_syscall.h): it maps
// memory and makes a raw thread there, and goes on at once. That has the C library make a proper
// one, which does the work, and both end. So no thread of the program is hijacked, and none waits
// for ours: a lock that ours needs is released as it always is. The tool may be killed at any
// instant: the threads inside end by themselves, and what they used stays mapped until the next
// call. docs/adr/0052-calls-inside.md.
//
// Thread-safe, as long as one at a time acts on a process.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "attach/c_library.h"
#include "attach/inside_block.h"
#include "base/fd.h"
#include "base/result.h"
#include "proc/address_space.h"
#include "proc/process_id.h"

namespace stasis::attach {

// A process that was looked at, and in which a call can be made (suitable.h).
class Inside {
 public:
  // Of a process that runs, nothing of which has been touched. kNotSupported, kBusy, kNotPermitted,
  // with the reason: it is to be left alone.
  static Result<Inside> open(Pid pid);

  const proc::AddressSpace& space() const { return space_; }
  const CLibrary& library() const { return library_; }
  const std::vector<proc::Mapping>& mappings() const { return mappings_; }

 private:
  friend class InsideCall;
  Inside(proc::AddressSpace space, ProcessId id, std::vector<proc::Mapping> mappings,
         CLibrary library)
      : space_(std::move(space)),
        id_(id),
        mappings_(std::move(mappings)),
        library_(std::move(library)) {}

  proc::AddressSpace space_;
  ProcessId id_;
  std::vector<proc::Mapping> mappings_;
  CLibrary library_;
};

struct InsideWork {
  InsideJob job = InsideJob::kNothing;
  // Of a survey.
  std::uint64_t get_attributes = 0;
  std::uint64_t get_handle = 0;
  std::vector<SurveyRange> ranges = {};  // kMostRanges at most
  std::uint64_t step = 0;
  // Of a library that is loaded: its file, open here, what of it is called, and with what.
  const UniqueFd* library = nullptr;
  std::string library_name = {};  // by which it is seen in the target's mappings
  std::string function = {};
  std::uint64_t argument = 0;
  // Of one that is there: where the function lies.
  std::uint64_t address = 0;
};

struct InsideAnswer {
  InsideBlock block{};
  std::vector<SurveyAnswer> answers = {};
  // Memory that stays mapped in the target, because its C library keeps something there; the next
  // call uses it.
  std::uint64_t kept_bytes = 0;
};

// Has the target load the library of `file`, a copy of it, so that neither a path nor a mount
// namespace matters, and call `function` of it (int(uint64_t)) with `argument`; its answer. The
// library stays. kNotSupported, with the loader's words.
Result<int> load_inside(const Inside& inside, const UniqueFd& file, const std::string& name,
                        const std::string& function, std::uint64_t argument,
                        std::chrono::milliseconds timeout);

// The same of a function that lies at `address` already.
Result<int> call_function_inside(const Inside& inside, std::uint64_t address,
                                 std::uint64_t argument, std::chrono::milliseconds timeout);

// kTimeout: a thread of ours is still inside, and its memory stays. On every other error it is
// gone, or was never made. kNotSupported: the target refuses what is needed.
Result<InsideAnswer> call_inside(const Inside& inside, const InsideWork& work,
                                 std::chrono::milliseconds timeout);

}  // namespace stasis::attach
