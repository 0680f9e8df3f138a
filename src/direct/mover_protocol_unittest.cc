#include "direct/mover_protocol.h"

#include <gtest/gtest.h>

namespace stasis::direct::protocol {
namespace {

TEST(MoverProtocol, CarriesAnErrorWhole) {
  const Error error{ErrorCode::kOutOfGpuMemory,
                    "cannot use GPU 3",
                    "free some",
                    DriverFailure{2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
                    {"while dumping process 12"}};
  const auto back = error_of(failed(error));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->code, error.code);
  EXPECT_EQ(back->to_string(), error.to_string());
  EXPECT_EQ(back->remedy, error.remedy);
  ASSERT_TRUE(back->driver);
  EXPECT_EQ(back->driver->number, 2);
  EXPECT_EQ(back->driver->name, "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_EQ(back->driver->text, "out of memory");
}

TEST(MoverProtocol, RefusesAnErrorThatIsCutShort) {
  const auto whole = failed(Error{ErrorCode::kIo, "text", "more", {}, {"one"}});
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_FALSE(error_of(std::span(whole).first(size))) << size;
  EXPECT_TRUE(error_of(whole));
}

TEST(MoverProtocol, KeepsAnErrorSmallEnoughForOneMessage) {
  const Error error{ErrorCode::kIo,
                    std::string(1 << 20, 'x'),
                    std::string(1 << 20, 'y'),
                    {},
                    std::vector<std::string>(1000, std::string(1 << 14, 'z'))};
  const auto bytes = failed(error);
  EXPECT_LT(bytes.size(), 64U << 10);
  EXPECT_TRUE(error_of(bytes));
}

TEST(MoverProtocol, TakesItemsOnlyInWhole) {
  const std::vector<Place> places = {{1, 2}, {3, 4}};
  auto bytes = with_items(Segments{}, std::span<const Place>(places));
  EXPECT_EQ(kind_of(bytes), Kind::kSegments);
  Segments head;
  std::vector<Place> got;
  ASSERT_TRUE(take_items(bytes, head, got));
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(got[1].offset, 4U);
  bytes.pop_back();
  EXPECT_FALSE(take_items(bytes, head, got));
  EXPECT_FALSE(take_items(std::span<const std::byte>(), head, got));
}

}  // namespace
}  // namespace stasis::direct::protocol
