#include "base/json_text.h"

#include <sys/resource.h>

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis {
namespace {

TEST(JsonText, WhatIsWithinBoundsIsRead) {
  EXPECT_EQ(parse_json(R"({"a": [1, {"a": 2}], "b": {"a": 3}})")["a"][1]["a"], 2);
  EXPECT_EQ(json_problem("7"), "");
}

TEST(JsonText, ManyValuesAreRefusedBeforeTheyAreInMemory) {
  constexpr std::size_t kText = 60U << 20;
  std::string text = "[{}";
  while (text.size() < kText)
    text += ",{}";
  text += "]";
  rusage before{};
  ::getrusage(RUSAGE_SELF, &before);
  EXPECT_EQ(json_problem(text), "it has more than 2097152 values");
  EXPECT_TRUE(parse_json(text).is_discarded());
  rusage after{};
  ::getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 128 << 10);  // KiB; with sanitizers, too
}

TEST(JsonText, DeepNestingIsRefused) {
  for (const std::size_t depth : {std::size_t{65}, std::size_t{10'000'000}}) {
    const std::string text = R"({"a": )" + std::string(depth, '[') + std::string(depth, ']') + "}";
    EXPECT_EQ(json_problem(text), "it is nested too deeply");
    EXPECT_TRUE(parse_json(text).is_discarded());
  }
  EXPECT_EQ(json_problem(std::string(64, '[') + std::string(64, ']')), "");
}

TEST(JsonText, AKeyTwiceOrNoJsonIsRefused) {
  EXPECT_EQ(json_problem(R"({"a": 1, "a": 2})"), "a field stands twice");
  for (const char* text : {"", "{", "[1,]", "{\"a\"}", "nul", "[] []", "\"\xff\""})
    EXPECT_EQ(json_problem(text), "it is no JSON") << text;
}

}  // namespace
}  // namespace stasis
