#include "report/page.h"

#include <regex>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "page_files.h"
#include "report/drawings.h"

namespace stasis::report {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr const char* kNonce = "0123456789abcdef";

ImageReport small_image() {
  ImageReport out;
  out.path = "/images/job";
  Manifest& m = out.manifest;
  m.stasis_version = "0.1.0";
  m.created = "2026-11-21T09:30:00Z";
  m.hostname = "node7";
  m.kernel_release = "6.1.0";
  m.criu_version = 40201;
  m.driver_version = "580.159.04";
  m.cuda_version = 13000;
  m.gpus = {{"GPU-1", "H100", 80ULL << 30, "00000000:18:00.0"}};
  m.root = Pid{100};
  ProcessRecord root{Pid{100},
                     Pid{0},
                     {"python3", "train.py"},
                     true,
                     CudaState::kRunning,
                     {{"GPU-1", 2ULL << 30}}};
  m.processes = {root, {Pid{101}, Pid{100}, {"loader"}, false, {}, {}}};
  m.phases = {{"lock", 0.01}, {"checkpoint", 0.6}, {"criu", 0.3}};
  m.files = {{"criu/pages-1.img", 900, ""}, {"criu/core-100.img", 100, ""}};
  m.total_bytes = 1000;
  out.parts = {{"memory of process 100", 900}, {"all else", 100}};
  out.checks = {{"criu", {}}, {"driver", {}}};
  return out;
}

std::string page_of(const ImageReport& image) {
  return render_page({image, false, {}, {}, "2026-11-22T00:00:00Z", kNonce});
}

std::size_t count(const std::string& text, std::string_view what) {
  std::size_t out = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1))
    ++out;
  return out;
}

// What is left of the page's own tags, attributes and text when an image says `hostile` wherever it
// can say anything.
std::string page_saying(const std::string& hostile) {
  ImageReport image = small_image();
  Manifest& m = image.manifest;
  image.path = "/images/" + hostile;
  m.stasis_version = m.created = m.hostname = m.kernel_release = m.driver_version = hostile;
  m.gpus[0] = {hostile, hostile, 1, hostile};
  m.processes[0].command = {hostile, hostile};
  m.processes[0].gpu_memory[0].gpu_uuid = hostile;
  m.phases[0].name = hostile;
  m.criu_options.external = {hostile};
  m.criu_options.lsm_profile = hostile;
  image.here = {hostile, hostile, hostile, hostile, 13000, false};
  image.parts[1].what = hostile;
  image.checks.push_back({"files", Error{ErrorCode::kImageCorrupt, hostile, hostile}});
  Subject subject{image, false, {}, {}, "now", kNonce};
  CriuLog log;
  log.errors = {hostile};
  log.diagnosis = CriuDiagnosis{ErrorCode::kCriuFailed, hostile, hostile, hostile, {}};
  subject.logs.push_back({ImageLog{hostile, hostile, {}, 1}, log});
  return render_page(subject);
}

TEST(Page, SaysWhatTheImageHolds) {
  const std::string page = page_of(small_image());
  for (const char* words :
       {"python3 train.py", "node7", "Can be restored on this machine", "memory of process 100",
        "2026-11-21", "00000000:18:00.0", "580.159.04", "90.0 %", "600 ms", "13.0"})
    EXPECT_THAT(page, HasSubstr(words));
  EXPECT_THAT(page, Not(HasSubstr("--ghost-limit")));  // the default
  ImageReport with_limit = small_image();
  with_limit.manifest.criu_options.ghost_limit = 1 << 20;
  EXPECT_THAT(page_of(with_limit), HasSubstr("--ghost-limit 1048576"));
  EXPECT_THAT(page, Not(HasSubstr("Simulated GPU")));
  // The timeline is there for wide and for narrow pages, a part's bar once.
  EXPECT_EQ(count(page, "class=\"row\""), 2 * 3);
  EXPECT_EQ(count(page, "class=\"amount\""), 2);
  EXPECT_THAT(page, HasSubstr("width=\"90.0000%\""));
  EXPECT_THAT(page, Not(HasSubstr("{{")));
}

// What a person comes for stands first: how to bring it back, and how long it stood still.
TEST(Page, BeginsWithTheCommandAndTheDowntime) {
  ImageReport image = small_image();
  std::string page = page_of(image);
  EXPECT_THAT(page, HasSubstr(">stasis restore --detach /images/job<"));
  EXPECT_LT(page.find("stasis restore --detach"), page.find("id=\"checks\""));
  EXPECT_THAT(page, HasSubstr("Downtime until saved</dt><dd><span class=\"figure\">910 ms"));
  image.path = "/images/it's a job";
  EXPECT_THAT(page_of(image), HasSubstr("/images/it"));
  EXPECT_THAT(page_of(image), HasSubstr("--detach &apos;"));
  // A gate that was opened once more counts from its last close; a dump without CRIU's phase not.
  image.manifest.phases = {
      {"close", 5}, {"prepare", 1}, {"close", 0.25}, {"criu", 0.25}, {"sync", 9}};
  EXPECT_THAT(page_of(image),
              HasSubstr("Downtime until saved</dt><dd><span class=\"figure\">500 ms"));
  image.manifest.phases = {{"lock", 1}};
  EXPECT_THAT(page_of(image), HasSubstr("Downtime until saved</dt><dd><span class=\"figure\">–"));
}

TEST(Page, OfAJobNamesTheLineThatGoesOn) {
  ImageReport image = small_image();
  image.manifest.job = JobRecord{{"python3", "my train.py"}, {}};
  image.manifest.files.push_back({"criu/stasis-shm-index.json", 1, ""});
  EXPECT_THAT(page_of(image),
              HasSubstr("stasis run --images-dir /images -- python3 &apos;my train.py&apos;"));
}

TEST(Page, SaysWhereMemoryIs) {
  ImageReport image = small_image();
  std::string page = page_of(image);
  EXPECT_THAT(page,
              HasSubstr("in the memory of its process, where the driver put it, contexts too"));
  EXPECT_THAT(page, HasSubstr("data-label=\"In use\">2.00 GiB"));
  image.content = ContentReport{};
  image.content->all = {2ULL << 30, 1ULL << 29, 1ULL << 28, 1ULL << 30, 0, 1ULL << 30};
  page = page_of(image);
  EXPECT_THAT(page, HasSubstr("files of its own, copied past the driver"));
  EXPECT_THAT(page, HasSubstr("data-label=\"Zeros\">512 MiB"));
  EXPECT_THAT(page, Not(HasSubstr("where the driver put it")));
  EXPECT_THAT(page, Not(HasSubstr("Host memory, large")));
  image.host_content = ContentReport{};
  image.host_content->kind = ContentKind::kHost;
  image.host_content->all = {3ULL << 30, 7ULL << 27, 0, 1ULL << 30, 0, 1ULL << 30};
  page = page_of(image);
  EXPECT_THAT(page, HasSubstr("Host memory, large"));
  EXPECT_THAT(page, HasSubstr("files of its own, written by all processors"));
  EXPECT_THAT(page, HasSubstr("data-label=\"In use\">3.00 GiB"));
  EXPECT_THAT(page, HasSubstr("data-label=\"Zeros\">896 MiB"));
}

TEST(Page, ExplainsEveryPhaseThatADumpHas) {
  ImageReport image = small_image();
  image.manifest.phases.clear();
  for (const char* name :
       {"base", "criu start", "prepare", "zeros", "close", "copy out", "mover", "content", "evict",
        "lock", "checkpoint", "criu", "host memory", "pre-copy", "finish", "checksums", "sync"})
    image.manifest.phases.push_back({name, 0.1});
  EXPECT_THAT(page_of(image), Not(HasSubstr("of another version")));
  image.manifest.phases.push_back({"unheard of", 0.1});
  EXPECT_THAT(page_of(image), HasSubstr("of another version"));
}

TEST(Page, ShowsWhatRanBesideWhat) {
  ImageReport image = small_image();
  image.manifest.phases = {{"checkpoint", 1, 0.0}, {"criu", 2, 2.0}, {"sync", 1}};
  image.manifest.beside = {{"driver: checkpoint 100", 0.75, 0.0},
                           {"driver: checkpoint 101", 0.5, 0.25},
                           {"oven: bake", 4.5, 3.5}};
  const std::string page = page_of(image);
  // From the first to the last end, 8 s, with the second that no phase has.
  EXPECT_THAT(page, HasSubstr("c-driver beside\" x=\"3.1250%\" width=\"6.2500%\""));
  EXPECT_THAT(page, HasSubstr("c-criu\" x=\"25.0000%\" width=\"25.0000%\""));
  EXPECT_THAT(page, HasSubstr("c-other\" x=\"50.0000%\" width=\"12.5000%\""));
  EXPECT_THAT(page, HasSubstr(">checkpoint 101</text>"));
  EXPECT_THAT(page, HasSubstr("beside: the driver, with the process of that number"));
  EXPECT_THAT(page, HasSubstr("beside: a step of another version"));
  EXPECT_THAT(page, HasSubstr("in 3 phases; the longest, “criu”, took 25.0 % of it"));
  // In the order in which they began.
  EXPECT_LT(page.find("driver: checkpoint 101"), page.find("oven: bake"));
}

TEST(Page, TheLastTimeOfTheAxisEndsAtItsLineWhereItWouldStandOut) {
  ImageReport image = small_image();
  image.manifest.phases = {{"lock", 0.0116}, {"checkpoint", 0.2}};
  EXPECT_THAT(page_of(image), HasSubstr("text-anchor=\"end\">200 ms</text>"));
}

TEST(Page, SaysWhatStandsInTheWay) {
  ImageReport image = small_image();
  image.manifest.simulated = true;
  image.checks.push_back(
      {"process-numbers", Error{ErrorCode::kPidInUse, "number 100 is taken", "end it"}});
  const std::string page = page_of(image);
  EXPECT_THAT(page, HasSubstr("Cannot be restored here, now"));
  EXPECT_THAT(page, HasSubstr("1 of 3 checks"));
  EXPECT_THAT(page, HasSubstr("number 100 is taken"));
  EXPECT_THAT(page, HasSubstr("end it"));
  EXPECT_THAT(page, HasSubstr("pid-in-use"));
  EXPECT_THAT(page, HasSubstr("Simulated GPU."));
}

// A page may load nothing and run nothing, and its template puts nothing into it unescaped.
TEST(Page, IsOnePageWithoutScripts) {
  const std::string html = kPageHtml;
  EXPECT_THAT(html, HasSubstr("default-src 'none'; style-src 'nonce-{{nonce}}'"));
  EXPECT_THAT(html, Not(HasSubstr("{{{")));
  EXPECT_THAT(html, Not(HasSubstr("{{&")));
  EXPECT_EQ(count(html, "{{>"), 1U) << "only the style sheet of our own";
  for (const char* word :
       {"<script", " style=", "src=", "url(", "@import", "http:", "https:", "//"})
    EXPECT_THAT(html + kPageCss, Not(HasSubstr(word)));
  // Only links within it.
  EXPECT_EQ(count(html, "href="), count(html, "href=\"#"));
}

TEST(Page, EscapesWhateverAnImageSays) {
  const std::string hostile =
      "</style></script><script>alert(1)</script><img src=x onerror=alert(1)>\" "
      "onfocus=\"alert(1)\" "
      "' x='{{nonce}}{{{css}}}{{#tree}}&lt;\x01\x1b[2J\x7f\xff\xc2\x9b\xe2\x80\xae\n--><!--";
  const std::string page = page_saying(hostile);
  const std::string harmless = page_saying("harmless");
  // Not one tag, attribute or comment more than a harmless image's page has.
  for (const char* what : {"<", ">", "\""})
    EXPECT_EQ(count(page, what), count(harmless, what)) << what;
  EXPECT_EQ(count(page, kNonce), 2U) << "a template in a name is not filled in";
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  for (const char* what : {"\x01", "\x1b", "\x7f", "\xff", "\xc2\x9b", "\xe2\x80\xae"})
    EXPECT_THAT(page, Not(HasSubstr(what)));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(1)&lt;/script&gt;"));
}

RC_GTEST_PROP(Page, HasTheSameTagsWhateverAnImageSays, (const std::string& hostile)) {
  static const std::string harmless = page_saying("harmless");
  const std::string page = page_saying("x" + hostile);
  for (const char* what : {"<", ">", "\""})
    RC_ASSERT(count(page, what) == count(harmless, what));
  for (const char c : page)
    RC_ASSERT(static_cast<unsigned char>(c) >= 0x20 || c == '\n');
}

TEST(Page, StaysReadableWhateverTheSize) {
  ImageReport image = small_image();
  Manifest& m = image.manifest;
  for (int i = 0; i < 30000; ++i)
    m.processes.push_back({Pid{1000 + i}, Pid{i == 0 ? 100 : 999 + i}, {"deep"}, false, {}, {}});
  m.processes.push_back({Pid{70000}, Pid{70001}, {"a circle"}, false, {}, {}});
  m.processes.push_back({Pid{70001}, Pid{70000}, {"a circle"}, false, {}, {}});
  m.processes[0].command = {std::string(1 << 20, 'x')};
  for (int i = 0; i < 253; ++i)
    m.phases.push_back({std::string(65536, 'p'), 9007199254.740991});
  for (unsigned i = 0; i < 60000; ++i)
    image.parts.push_back({"memory of process", i});
  m.criu_options.external.assign(4096, std::string(65536, 'e'));
  const std::string page = page_of(image);
  EXPECT_LT(page.size(), 3U << 20);
  EXPECT_EQ(count(page, "class=\"row\""), 2 * kMostDrawn);
  EXPECT_EQ(count(page, "class=\"amount\""), 500);
  EXPECT_EQ(count(page, "<ul"), count(page, "</ul>"));
  EXPECT_EQ(count(page, "<li>"), count(page, "</li>"));
  EXPECT_THAT(page, HasSubstr("child of 1011<")) << "where a list in a list would be too deep";
  EXPECT_THAT(page, HasSubstr("more; `stasis inspect --json` shows all."));
}

TEST(Page, AnImageWithoutTimesOrSizesHasNoDrawings) {
  ImageReport image = small_image();
  image.manifest.phases.clear();
  image.parts = {{"all else", 0}};
  image.manifest.total_bytes = 0;
  image.manifest.gpus.clear();
  const std::string page = page_of(image);
  EXPECT_EQ(count(page, "<svg class=\"drawing"), 0U);
  EXPECT_THAT(page, HasSubstr("width=\"0.0000%\""));
  EXPECT_THAT(page, HasSubstr("The image does not say."));
  image.manifest.phases = {{"lock", 0}};
  EXPECT_THAT(page_of(image), Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace stasis::report
