// The examples of each verb, for help texts and man pages. A test runs every one of them as far as
// its words go (tests/integration/manual_pages.bats).
#include <algorithm>
#include <array>

#include "cli/help.h"

namespace stasis::cli {
namespace {

struct ExamplesOfVerb {
  std::string_view verb;
  std::array<Example, 3> examples;
};

constexpr auto kExamples = std::to_array<ExamplesOfVerb>({
    {"",
     {{{"stasis run --name training -- python3 train.py", "start a program under a name"},
       {"stasis dump training image-1", "save it to disk and end it"},
       {"stasis restore image-1 --detach", "it goes on, exactly where it was"}}}},
    {"run",
     {{{"stasis run --name training -- python3 train.py",
        "start it under a name that other verbs take"},
       {"stasis run -D /scratch/job-42 --every 30m -- python3 train.py",
        "a job that is saved every 30 minutes and when the scheduler sends SIGTERM; the same line "
        "goes on from the newest image"},
       {"stasis run -D /scratch/job-42 --keep 5 --on-signal TERM,USR1 -- ./simulate",
        "keep five images; SIGUSR1 saves it and lets it go on"}}}},
    {"attach",
     {{{"stasis attach 4711 --graphs-are-safe",
        "from now on its GPU memory goes past the driver; it uses no CUDA graphs, or none with a "
        "copy from or to the host"},
       {"stasis attach 4711 --watch-graphs 30s",
        "the same if it launches no graph in half a minute, in which it would launch each"},
       {"stasis attach training --graphs-are-safe --timeout 60s",
        "by its name, waiting a minute for its work on the GPU"}}}},
    {"ps",
     {{{"stasis ps", "a table of all of them"},
       {"stasis ps --watch 5", "the same, every five seconds"},
       {"stasis ps --format csv --columns pid,name,state,gpu_bytes",
        "these columns, for a spreadsheet"}}}},
    {"suspend",
     {{{"stasis suspend training", "its GPU memory is free; `stasis resume` brings it back"},
       {"stasis suspend 4711 --timeout 2m", "wait two minutes for a kernel that runs"},
       {"stasis suspend 4711 --group /shared/job-42 --parts 4",
        "together with the tools of three other nodes"}}}},
    {"resume",
     {{{"stasis resume training", "it runs again, on the GPU where it was"},
       {"stasis resume training --device-map 0=1", "on GPU 1, where it was on GPU 0"},
       {"stasis resume 4711 --group /shared/job-42 --parts 4",
        "and hear of the parts that cannot be resumed"}}}},
    {"swap",
     {{{"stasis swap chat-a chat-b", "chat-a gives its GPU memory up, chat-b takes its place"},
       {"stasis swap chat-b chat-a", "and back"},
       {"stasis swap chat-a chat-b --timeout 1m", "wait a minute for chat-a's kernels"}}}},
    {"dump",
     {{{"stasis dump training image-1", "save it to image-1 and end it"},
       {"stasis dump training image-2 --leave-running --base image-1",
        "let it go on; write only GPU memory that has changed since image-1"},
       {"stasis dump 4711 /images/it --force --compress lz4",
        "in place of an older image, compressed"}}}},
    {"restore",
     {{{"stasis restore image-1", "stay until it ends, with its exit status"},
       {"stasis restore image-1 --detach --device-map 0=1", "on GPU 1, and return when it runs"},
       {"stasis restore image-1 --verify first", "read to its last byte before"}}}},
    {"recover",
     {{{"stasis recover --all", "after a `kill -9` of stasis"},
       {"stasis recover training", "this one, whatever has left it suspended or locked"},
       {"stasis recover --all --timeout 5m", "begin with no further one after five minutes"}}}},
    {"doctor",
     {{{"stasis doctor", "can this machine suspend, dump and restore?"},
       {"stasis doctor training --images-dir /scratch", "this program, to this disk"},
       {"stasis doctor -v --no-trial", "what is fine too, without a trial on each GPU"}}}},
    {"explain",
     {{{"stasis explain image-corrupt", "an error by its code"},
       {"stasis explain 801", "an answer of the driver"},
       {"stasis explain \"Error (criu/sk-inet.c:198): inet: Connected TCP socket\"",
        "a line of CRIU's log"}}}},
    {"inspect",
     {{{"stasis inspect image-1", "what it is, and whether it can be restored here"},
       {"stasis inspect /scratch/job-42 --verify", "a job's newest, every byte read"},
       {"stasis inspect image-1 --device-map 0=1 --json", "as a restore to GPU 1 would see it"}}}},
    {"verify",
     {{{"stasis verify image-1", "is every byte of it as it was written?"},
       {"stasis verify /scratch/job-42", "the same of a job's newest image"},
       {"stasis verify image-1 --json", "for a program"}}}},
    {"logs",
     {{{"stasis logs image-1", "what CRIU complained of, and what that means"},
       {"stasis logs image-1 --full", "all of the newest log"},
       {"stasis logs image-1 --json", "for a program"}}}},
    {"report",
     {{{"stasis report image-1 -o image-1.html", "one page to read, or to send"},
       {"stasis report /scratch/job-42 -o newest.html --verify",
        "a job's newest image, every byte read"},
       {"stasis report image-1 -o image-1.html --force", "in place of an older page"}}}},
    {"config",
     {{{"stasis config", "each default of this site and user, and where it comes from"},
       {"stasis config dump", "those of one verb"},
       {"stasis config --json", "for a program"}}}},
});

}  // namespace

std::span<const Example> examples_of(std::string_view verb) {
  const auto found = std::find_if(kExamples.begin(), kExamples.end(),
                                  [&](const ExamplesOfVerb& one) { return one.verb == verb; });
  if (found == kExamples.end()) return {};
  return found->examples;
}

}  // namespace stasis::cli
