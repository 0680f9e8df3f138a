// What the tool and its code inside a target agree on (inside_code.cc): one block in the target's
// memory, which the tool fills and reads through /proc/PID/mem. Both are of one build.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stasis::attach {

// What a thread of ours has come to. Each is written by one thread.
enum class InsideState : std::uint32_t {
  kNotYet = 0,
  kBegun = 1,
  kDone = 2,
  kFailed = 3,     // `create_error` says why; of the first thread
  kCancelled = 4,  // before anything was done
};

enum class InsideJob : std::uint32_t {
  kNothing = 0,  // proves that a thread can be made
  kSurvey = 1,   // asks the driver what lies where
  kLoad = 2,     // loads a library and calls a function of it
  kCall = 3,     // calls a function of a library that is there
};

// How cuPointerGetAttributes answers, by the number of the attribute.
enum SurveyAttribute : unsigned {
  kSurveyContext,
  kSurveyType,
  kSurveyStart,
  kSurveySize,
  kSurveyIpc,
  kSurveyPool,
  kSurveyManaged,
  kSurveyHandles,
  kSurveyMapped,
  kSurveyAttributes,
};

struct SurveyRange {
  std::uint64_t start;
  std::uint64_t end;
};

// One allocation, as the driver describes it.
struct SurveyAnswer {
  std::uint64_t asked;  // the address that was asked for
  std::uint64_t values[kSurveyAttributes];
  // Of memory from a pool: what cuMemGetHandleForAddressRange said. kNotAsked, kNoFunction.
  std::uint32_t handle_result;
  std::uint32_t reserved;
};
inline constexpr std::uint32_t kNotAsked = ~0U;
inline constexpr std::uint32_t kNoFunction = ~0U - 1;

// For which there is room.
inline constexpr std::size_t kMostRanges = 4096;
inline constexpr std::size_t kMostAnswers = 4096;

struct InsideBlock {
  std::uint32_t first_state;  // InsideState, of the thread that the kernel made for the tool
  std::uint32_t state;        // InsideState, of the one that the C library made
  std::int32_t create_error;  // pthread_create's
  std::int32_t tid;           // of the second, in its own PID namespace
  std::uint64_t thread;       // pthread_t of the second
  std::uint32_t first_tid;    // the kernel sets it to 0 when the first has ended
  std::uint32_t cancel;       // written by the tool: end soon

  std::uint64_t way_back;  // for a thread of the program whose tool is killed in its system call
  std::uint64_t pthread_create;
  std::uint64_t attr_init;
  std::uint64_t attr_set_detached;
  std::uint64_t attributes[8];  // pthread_attr_t
  std::uint64_t rseq_area;      // 0: none is to be registered
  std::uint32_t rseq_size;
  std::uint32_t rseq_signature;

  std::uint32_t job;  // InsideJob
  // The survey.
  std::uint32_t overflow;    // more allocations than there was room for
  std::uint32_t last_error;  // CUresult of the last question that failed
  std::uint32_t failures;
  std::uint64_t get_attributes;
  std::uint64_t get_handle;  // 0: the driver has none
  std::uint64_t ranges;      // SurveyRange[]
  std::uint64_t range_count;
  std::uint64_t step;
  std::uint64_t answers;  // SurveyAnswer[]
  std::uint64_t answer_room;
  std::uint64_t answer_count;
  std::uint64_t questions;
  std::uint64_t dense_questions;
  // A library, from a descriptor of the target's, which is closed afterwards.
  std::uint64_t dlopen;
  std::uint64_t dlsym;
  std::uint64_t dlerror;
  std::int32_t descriptor;
  std::int32_t result;     // the function's
  std::uint64_t argument;  // handed to it
  std::uint64_t handle;    // 0: it was not loaded
  std::uint64_t function;  // 0: it is not there; of kCall, where it is
  char name[64];           // of the function
  char path[64];           // by which it is loaded; none is loaded twice by the same
  char error[256];         // the loader's words
};
inline constexpr std::size_t kWayBackInBlock = 32;
static_assert(offsetof(InsideBlock, way_back) == kWayBackInBlock, "inside_code.cc jumps by it");

}  // namespace stasis::attach
