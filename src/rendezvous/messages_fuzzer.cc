// libFuzzer's way into the messages between parts; built with clang and STASIS_FUZZ=ON.
//
// The input is read as a request, as an answer and as a list of names: what is taken is written
// again as it was, and the server's records stand whatever a request says.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "rendezvous/messages.h"
#include "rendezvous/record_store.h"

using namespace stasis::rendezvous;  // NOLINT(google-build-using-namespace): a program, no header

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto request = request_from_bytes(bytes)) {
    if (to_bytes(*request) != bytes) std::abort();
    RecordStore store;
    (void)store.claim("lead", "another", "text");
    const Answer answer = store.answer(*request, "caller");
    if (!answer_from_bytes(to_bytes(answer))) std::abort();
    const auto kept = store.read("lead");
    if (request->verb == Verb::kClaim && kept != "text") std::abort();
  }
  if (const auto answer = answer_from_bytes(bytes); answer && to_bytes(*answer) != bytes)
    std::abort();
  if (const auto names = names_from_text(bytes); names && names_to_text(*names) != bytes)
    std::abort();
  return 0;
}
