// What the verbs that show an image have in common, whatever they make of it.
//
// Functions of an ImageReport only; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "image/image_reader.h"
#include "operations/operations.h"

namespace stasis {

// The options of the dump that a restore uses again and that are not the default, by the words of
// the command line.
std::vector<std::string> options_used(const CriuOptions& criu);

// On all GPUs; 0 if unknown.
std::uint64_t gpu_bytes(const ProcessRecord& process);

// The tree as lines from top to bottom: the root's first, then what is not below the root.
struct TreeLine {
  const ProcessRecord* process;
  std::size_t depth;  // 0 for the root; that of its parent's line, above it, and one
  bool last;          // of its parent's children
};
// A manifest is untrusted: it may name parents in a circle, and be as deep as it has processes:
// each is there once, at most `most` of them.
std::vector<TreeLine> tree_lines(const Manifest& manifest, std::size_t most);

// Nothing if the image has none, or it cannot be read.
std::optional<ContentReport> report_content(const ImageReader& image, ContentKind kind);

// "16 GiB of GPU memory in 8.2 GiB (51 %), 4 GiB are zeros, 3.8 GiB are repetitions, stored
// once"
std::string content_text(const ContentUse& use, ContentKind kind);
std::string content_text(const ContentReport& content);

// Is nothing known to stand in the way of a restore here?
bool restorable(const ImageReport& report);
// What was in the /dev/shm of a job of `stasis run` is in the image: only such a job goes on from
// it, and restore() refuses it.
bool is_for_a_job(const Manifest& manifest);
// The line that goes on from the newest image beside this one, with what is in the image of the
// one that started the job: the command, and its name if it was given one.
std::string line_of_job(const Manifest& manifest, const std::string& image);
// Whether the user has given the job this name; others are made up, and differ at each start.
bool is_chosen(const std::string& job_name);
// That the image is this user's, or root's: what is in it runs as this user. Under sudo that of the
// user who has called it counts, and for root on NFS that of the user 65534, whom a server may put
// for root. kNotPermitted.
Result<void> check_owner(const ImageReader& image);
// As a shell takes it.
std::string shell_word(const std::string& word);

}  // namespace stasis
