// An image as one HTML page that needs nothing besides itself: no script, no network, no font.
//
// What the page looks like is in page.html (a Mustache template) and page.css, which are compiled
// in; this fills them in. All that comes from an image is untrusted: it gets into the page only
// through the template's escaping, and loses what is no text before (base/printable.h). Plain
// values; any thread.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "criu/criu_log.h"
#include "operations/image_logs.h"
#include "operations/operations.h"

namespace stasis::report {

struct ShownLog {
  ImageLog log;
  Result<CriuLog> content;
};

struct Subject {
  const ImageReport& image;
  bool verified = false;         // every byte was read
  std::vector<ShownLog> logs;    // the newest first
  std::optional<Error> no_logs;  // why they could not be looked for
  std::string made;              // when the page is made, "2026-11-21T09:30:00Z"
  // Letters and digits that no image could know before: what is between the page's own <style> tags
  // is obeyed for it, and nothing else is.
  std::string nonce;
};

std::string render_page(const Subject& subject);

}  // namespace stasis::report
