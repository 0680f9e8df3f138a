#include "driver/gpu_map.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace stasis {
namespace {

using testing::HasSubstr;

Gpu gpu(unsigned number, const std::string& model = "H100", std::uint64_t memory = 80) {
  Gpu out;
  out.uuid.bytes.fill(0);
  out.uuid.bytes.at(0) = 0xab;
  out.uuid.bytes.at(3) = static_cast<std::uint8_t>(number);
  out.name = model;
  out.memory_total = memory;
  out.pci_bus_id = fmt::format("00000000:{:02X}:00.0", 0x10 + number);
  return out;
}

std::vector<Gpu> gpus(unsigned count) {
  std::vector<Gpu> out;
  for (unsigned i = 0; i < count; ++i)
    out.push_back(gpu(i));
  return out;
}

TEST(ParseGpuMap, SplitsPairs) {
  auto map = parse_gpu_map("0=1,GPU-x=65:00.0");
  ASSERT_TRUE(map);
  ASSERT_EQ(map->size(), 2U);
  EXPECT_EQ((*map)[0].from, "0");
  EXPECT_EQ((*map)[0].to, "1");
  EXPECT_EQ((*map)[1].from, "GPU-x");
  EXPECT_EQ((*map)[1].to, "65:00.0");
}

TEST(ParseGpuMap, RefusesWhatIsNoMap) {
  for (const char* text : {"", "0", "=", "0=", "=1", "0=1,", ",0=1", "0=1,,1=0", "0=1=2", "0:1"}) {
    auto map = parse_gpu_map(text);
    ASSERT_FALSE(map) << text;
    EXPECT_EQ(map.error().code, ErrorCode::kDeviceMapInvalid);
    EXPECT_THAT(map.error().remedy, HasSubstr("OLD=NEW"));
  }
}

RC_GTEST_PROP(ParseGpuMap, TakesApartWhatWasPutTogether, (const std::string& text)) {
  auto map = parse_gpu_map(text);
  if (!map) return;
  std::string again;
  for (const GpuMapEntry& entry : *map)
    again += (again.empty() ? "" : ",") + entry.from + "=" + entry.to;
  RC_ASSERT(again == text);
}

TEST(FindGpu, ByIndexUuidAndPciAddress) {
  const auto all = gpus(3);
  for (const char* name :
       {"1", "GPU-ab000001-0000-0000-0000-000000000000", "gpu-AB000001-0000-0000-0000-000000000000",
        "GPU-ab000001", "11:00.0", "0000:11:00.0", "00000000:11:00.0"}) {
    auto found = find_gpu(all, name);
    ASSERT_TRUE(found) << name;
    EXPECT_EQ(*found, all[1].uuid) << name;
  }
}

TEST(FindGpu, SaysWhatThereIs) {
  const auto all = gpus(2);
  for (const char* name : {"2", "-1", "+1", " 1", "", "GPU-", "GPU-ab", "GPU-ff000001", "12:00.0",
                           "11:00.1", ":", "99999999999999999999999", "0x1"}) {
    auto found = find_gpu(all, name);
    ASSERT_FALSE(found) << name;
    EXPECT_EQ(found.error().code, ErrorCode::kDeviceMapInvalid);
    EXPECT_THAT(found.error().remedy, HasSubstr("1: GPU-ab000001"));
  }
  EXPECT_THAT(find_gpu({}, "0").error().remedy, HasSubstr("none"));
}

TEST(FindGpu, AprefixOfTwoIsAmbiguous) {
  auto twins = gpus(2);
  twins[1].uuid = twins[0].uuid;
  twins[1].uuid.bytes.at(15) = 1;
  auto found = find_gpu(twins, "GPU-ab000000");
  ASSERT_FALSE(found);
  EXPECT_THAT(found.error().message, HasSubstr("ambiguous"));
  EXPECT_TRUE(find_gpu(twins, "GPU-ab000000-0000-0000-0000-000000000001"));
}

// The driver refuses {0=1} alone: every GPU must have a place.
TEST(CompleteGpuMap, OneEntryOnTwoGpusSwapsThem) {
  const auto two = gpus(2);
  const std::vector<GpuMapEntry> entries = {{"0", "1"}};
  auto map = complete_gpu_map(entries, two, two);
  ASSERT_TRUE(map);
  ASSERT_EQ(map->size(), 2U);
  EXPECT_EQ((*map)[0], (GpuPair{two[0].uuid, two[1].uuid}));
  EXPECT_EQ((*map)[1], (GpuPair{two[1].uuid, two[0].uuid}));
}

TEST(CompleteGpuMap, WhatIsNotMentionedStays) {
  const auto four = gpus(4);
  const std::vector<GpuMapEntry> entries = {{"0", "2"}};
  auto map = complete_gpu_map(entries, four, four);
  ASSERT_TRUE(map);
  EXPECT_EQ((*map)[0].to, four[2].uuid);
  EXPECT_EQ((*map)[1].to, four[1].uuid);
  EXPECT_EQ((*map)[2].to, four[0].uuid);
  EXPECT_EQ((*map)[3].to, four[3].uuid);
}

TEST(CompleteGpuMap, OnOtherGpusTheSameModelComesFirst) {
  const std::vector<Gpu> from = {gpu(0, "A100", 40), gpu(1, "H100", 80)};
  const std::vector<Gpu> to = {gpu(7, "H100", 80), gpu(8, "A100", 40)};
  auto map = complete_gpu_map({}, from, to);
  ASSERT_TRUE(map);
  EXPECT_EQ((*map)[0].to, to[1].uuid);
  EXPECT_EQ((*map)[1].to, to[0].uuid);
}

TEST(CompleteGpuMap, RefusesAnUnequalNumberOfGpus) {
  auto map = complete_gpu_map({}, gpus(2), gpus(1));
  ASSERT_FALSE(map);
  EXPECT_EQ(map.error().code, ErrorCode::kGpuMismatch);
  EXPECT_THAT(map.error().message, HasSubstr("2 GPUs and there are 1"));
}

TEST(CompleteGpuMap, RefusesAnameThatIsGivenTwice) {
  const auto three = gpus(3);
  for (const auto& entries : {std::vector<GpuMapEntry>{{"0", "1"}, {"0", "2"}},
                              std::vector<GpuMapEntry>{{"0", "1"}, {"2", "1"}},
                              std::vector<GpuMapEntry>{{"0", "1"}, {"GPU-ab000000", "2"}},
                              std::vector<GpuMapEntry>{{"0", "1"}, {"0", "1"}}}) {
    auto map = complete_gpu_map(entries, three, three);
    ASSERT_FALSE(map);
    EXPECT_EQ(map.error().code, ErrorCode::kDeviceMapInvalid);
    EXPECT_THAT(map.error().message, HasSubstr("twice"));
  }
}

TEST(CompleteGpuMap, SaysWhichSideIsUnknown) {
  const auto two = gpus(2);
  EXPECT_THAT(complete_gpu_map(std::vector<GpuMapEntry>{{"5", "0"}}, two, two).error().to_string(),
              HasSubstr("old side"));
  EXPECT_THAT(complete_gpu_map(std::vector<GpuMapEntry>{{"0", "5"}}, two, two).error().to_string(),
              HasSubstr("new side"));
}

// --- Properties: for any GPUs on both sides and any entries.

struct Machine {
  std::vector<Gpu> from;
  std::vector<Gpu> to;
};

// Some GPUs on both sides, some of them the same, of few models and sizes.
Machine any_machine() {
  const auto count = *rc::gen::inRange<unsigned>(0, 9);
  const auto side = [&] {
    std::set<unsigned> numbers;
    while (numbers.size() < count)
      numbers.insert(*rc::gen::inRange<unsigned>(0, 16));
    std::vector<Gpu> out;
    out.reserve(numbers.size());
    for (unsigned number : numbers) {
      out.push_back(gpu(number, *rc::gen::element<std::string>("A100", "H100"),
                        *rc::gen::element<std::uint64_t>(40, 80)));
    }
    if (*rc::gen::arbitrary<bool>()) std::reverse(out.begin(), out.end());
    return out;
  };
  Machine machine;
  machine.from = side();
  machine.to = side();
  return machine;
}

std::string any_name(const std::vector<Gpu>& all, std::size_t index) {
  switch (*rc::gen::inRange(0, 4)) {
    case 0:
      return std::to_string(index);
    case 1:
      return all[index].pci_bus_id;
    case 2:
      return all[index].uuid.to_string().substr(0, 12);
    default:
      return all[index].uuid.to_string();
  }
}

void assert_bijection(const Machine& machine, const std::vector<GpuPair>& map) {
  RC_ASSERT(map.size() == machine.from.size());
  std::set<GpuUuid> destinations;
  for (std::size_t i = 0; i < map.size(); ++i) {
    RC_ASSERT(map[i].from == machine.from[i].uuid);
    RC_ASSERT(destinations.insert(map[i].to).second);
    RC_ASSERT(std::any_of(machine.to.begin(), machine.to.end(),
                          [&](const Gpu& g) { return g.uuid == map[i].to; }));
  }
}

RC_GTEST_PROP(CompleteGpuMapProperty, OneToOneEntriesAreAlwaysCompleted, ()) {
  const Machine machine = any_machine();
  const std::size_t count = machine.from.size();
  std::vector<std::size_t> destinations(count);
  std::iota(destinations.begin(), destinations.end(), 0);
  for (std::size_t i = count; i > 1; --i)
    std::swap(destinations[i - 1], destinations[*rc::gen::inRange<std::size_t>(0, i)]);
  std::vector<GpuMapEntry> entries;
  std::vector<std::pair<std::size_t, std::size_t>> wanted;
  for (std::size_t i = 0; i < count; ++i) {
    if (!*rc::gen::arbitrary<bool>()) continue;
    wanted.emplace_back(i, destinations[i]);
    entries.push_back({any_name(machine.from, i), any_name(machine.to, destinations[i])});
  }
  auto map = complete_gpu_map(entries, machine.from, machine.to);
  RC_ASSERT(map.has_value());
  assert_bijection(machine, *map);
  for (const auto& [from, to] : wanted)
    RC_ASSERT((*map)[from].to == machine.to[to].uuid);
  // A GPU that is not mentioned, on either side, stays where it is.
  for (const GpuPair& pair : *map) {
    const auto mentions = [&](const GpuUuid& uuid) {
      return std::any_of(wanted.begin(), wanted.end(), [&](const auto& entry) {
        return machine.from[entry.first].uuid == uuid || machine.to[entry.second].uuid == uuid;
      });
    };
    const bool is_here = std::any_of(machine.to.begin(), machine.to.end(),
                                     [&](const Gpu& g) { return g.uuid == pair.from; });
    if (is_here && !mentions(pair.from)) RC_ASSERT(pair.to == pair.from);
  }
}

RC_GTEST_PROP(CompleteGpuMapProperty, AnyEntriesGiveAbijectionThatKeepsThemOrAnError, ()) {
  const Machine machine = any_machine();
  RC_PRE(!machine.from.empty());
  std::vector<GpuMapEntry> entries;
  const auto count = *rc::gen::inRange<std::size_t>(0, 6);
  for (std::size_t i = 0; i < count; ++i) {
    // One index too far now and then.
    entries.push_back({std::to_string(*rc::gen::inRange<std::size_t>(0, machine.from.size() + 1)),
                       std::to_string(*rc::gen::inRange<std::size_t>(0, machine.to.size() + 1))});
  }
  auto map = complete_gpu_map(entries, machine.from, machine.to);
  if (!map) {
    RC_ASSERT(map.error().code == ErrorCode::kDeviceMapInvalid);
    RC_ASSERT(!map.error().remedy.empty());
    return;
  }
  assert_bijection(machine, *map);
  for (const GpuMapEntry& entry : entries) {
    RC_ASSERT((*map)[std::stoul(entry.from)].to == machine.to[std::stoul(entry.to)].uuid);
  }
}

}  // namespace
}  // namespace stasis
