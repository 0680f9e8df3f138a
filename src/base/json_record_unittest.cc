#include "base/json_record.h"

#include <string>

#include <gtest/gtest.h>

namespace stasis {
namespace {

enum class Colour { kRed, kGreen };
std::string_view colour_name(Colour colour) { return colour == Colour::kRed ? "red" : "green"; }
std::optional<Colour> colour_of(std::string_view name) {
  if (name == "red") return Colour::kRed;
  return name == "green" ? std::optional(Colour::kGreen) : std::nullopt;
}

struct None {};
struct Part {
  Pid pid;
  std::vector<std::uint16_t> ports;
};
void fields(auto& io, Described<Part> auto& part) {
  io("pid", part.pid, Within{1, 99});
  io("ports", part.ports, Items{0, 2}, Within{1, 1000});
}
struct Whole {
  std::string name;
  Colour colour = Colour::kRed;
  std::vector<Part> parts;
  std::variant<None, Part> choice;
  std::optional<std::uint64_t> size = {};
};
void fields(auto& io, Described<Whole> auto& whole) {
  io("name", whole.name, Items{1, 8});
  io.named("colour", whole.colour, colour_name, colour_of, Items{0, 5});
  io("parts", whole.parts);
  io("choice", whole.choice);
  io.optional("size", whole.size);
}

const Whole kWhole{"name", Colour::kGreen, {{Pid{1}, {22, 80}}, {Pid{2}, {}}}, Part{Pid{3}, {}}, 7};

TEST(JsonRecord, ComesBackAsItWasWritten) {
  EXPECT_EQ(record_to_text(kWhole),
            R"({"choice":{"kind":1,"value":{"pid":3,"ports":[]}},"colour":"green","name":"name",)"
            R"("parts":[{"pid":1,"ports":[22,80]},{"pid":2,"ports":[]}],"size":7})");
  const auto back = record_from_text<Whole>(record_to_text(kWhole));
  ASSERT_TRUE(back);
  EXPECT_EQ(record_to_text(*back), record_to_text(kWhole));
  EXPECT_FALSE(record_to_json(Whole{"x", Colour::kRed, {}, {}}).contains("size"));
}

TEST(JsonRecord, ExactNumbersOnlyAreWritten) {
  Whole whole = kWhole;
  whole.size = UINT64_MAX;
  EXPECT_EQ(record_to_json(whole)["size"], kMostExact);
}

TEST(JsonRecord, SaysWhatIsWrongAndWhere) {
  const auto problem = [](const char* place, const char* value) {
    auto json = nlohmann::json::parse(record_to_text(kWhole));
    json[nlohmann::json::json_pointer(place)] = nlohmann::json::parse(value);
    JsonReader::Problem found{{}, 6};
    (void)JsonReader::read<Whole>(json, found);
    return found.what;
  };
  EXPECT_EQ(problem("/parts/1", "{}"), "parts[1].pid is missing");
  EXPECT_EQ(problem("/parts/0/pid", "100"), "parts[0].pid is 100, not within 1..99");
  EXPECT_EQ(problem("/parts/0/pid", "1.5"), "parts[0].pid is no whole number");
  EXPECT_EQ(problem("/parts/0/pid", "-1"), "parts[0].pid is no whole number");
  EXPECT_EQ(problem("/parts/0/ports", "[1,2,3]"), "parts[0].ports has 3 items, not 0..2");
  EXPECT_EQ(problem("/parts/0/ports", "[1,1001]"), "parts[0].ports[1] is 1001, not within 1..1000");
  EXPECT_EQ(problem("/parts", "7"), "parts is no array");
  EXPECT_EQ(problem("/name", R"("1234567")"), "name has 7 bytes, not 1..6");
  EXPECT_EQ(problem("/name", R"("")"), "name has 0 bytes, not 1..6");
  EXPECT_EQ(problem("/colour", R"("blue")"), "colour is no value that is known");
  EXPECT_EQ(problem("/colour", R"("purple")"), "colour has 6 bytes, not 0..5");
  EXPECT_EQ(problem("/choice/kind", "2"), "choice.kind is 2, not within 0..1");
  EXPECT_EQ(problem("/choice/value", "null"), "choice.value is no object");
  EXPECT_EQ(problem("/size", "true"), "size is no whole number");
  EXPECT_FALSE(record_from_text<Whole>("{"));
  EXPECT_FALSE(record_from_text<Whole>("[]"));
}

}  // namespace
}  // namespace stasis
