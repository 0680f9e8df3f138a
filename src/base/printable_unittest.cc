#include "base/printable.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace stasis {
namespace {

TEST(Printable, ReplacesWhatATerminalObeys) {
  EXPECT_EQ(printable("a\x1b[2J\x7f\tb"), "a?[2J??b");
  EXPECT_EQ(printable("\xc2\x9b"), "?") << "U+009B begins a command";
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "x"),
            "?x")
      << "U+202E turns the text";
  EXPECT_EQ(printable("a\nb"), "a?b");
  EXPECT_EQ(printable("a\nb", true), "a\nb");
  EXPECT_EQ(printable("größer, 大"), "größer, 大");
}

TEST(Printable, ReplacesWhatIsNoUtf8) {
  EXPECT_EQ(printable("\xff\xc0\x80\xe2\x82"), "?????");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "?");
}

TEST(Shortened, CountsCharactersAndMarksWhatIsMissing) {
  EXPECT_EQ(shortened("abc", 3), "abc");
  EXPECT_EQ(shortened("abcd", 3), "ab…");
  EXPECT_EQ(shortened("", 3), "");
  EXPECT_EQ(shortened("äöü", 3), "äöü");
  EXPECT_EQ(shortened("äöüß", 3), "äö…");
  EXPECT_EQ(shortened("abcd", 1), "…");
  EXPECT_EQ(shortened(std::string(100000, 'x'), 5), "xxxx…");
}

RC_GTEST_PROP(Shortened, IsNeverLongerAndAlwaysUtf8, (const std::string& text)) {
  const auto most = *rc::gen::inRange<std::size_t>(1, 20);
  const std::string made = shortened(text, most);
  RC_ASSERT(printable(made) == made);
  std::size_t characters = 0;
  for (const char c : made)
    characters += (static_cast<unsigned char>(c) & 0xc0U) != 0x80 ? 1 : 0;
  RC_ASSERT(characters <= most);
}

}  // namespace
}  // namespace stasis
