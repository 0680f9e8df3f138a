// Long because one sound manifest stands for those of all tests.
#include "image/manifest.h"

#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "image/image_test_support.h"
#include "image/manifest_format.h"

namespace stasis {
namespace {

using Json = nlohmann::ordered_json;

// The sample with one change, closed again with a right checksum.
template <class Change>
std::string changed(Change change) {
  Json json = Json::parse(serialize_manifest(sealed_manifest()));
  json.erase("manifest_xxh3");
  change(json);
  return close_manifest_text(json.dump(2));
}

ErrorCode code_of(const std::string& text) {
  auto manifest = parse_manifest(text);
  return manifest ? ErrorCode::kInternal : manifest.error().code;
}

TEST(Manifest, ComesBackAsItWasWritten) {
  auto manifest = parse_manifest(serialize_manifest(sealed_manifest()));
  ASSERT_TRUE(manifest) << manifest.error().to_string();
  EXPECT_EQ(*manifest, sealed_manifest());
}

TEST(Manifest, OfTooManyValuesIsRefusedBeforeTheyAreInMemory) {
  std::string text = "{\n  \"files\": [{}";
  for (std::size_t i = 0; i < manifest_format::kMaxValues; ++i)
    text += ",{}";
  auto manifest = parse_manifest(close_manifest_text(text + "]\n}"));
  ASSERT_FALSE(manifest);
  EXPECT_EQ(manifest.error().code, ErrorCode::kImageCorrupt);
  EXPECT_THAT(manifest.error().message, testing::HasSubstr("more than 2097152 values"));
}

TEST(Manifest, IsJsonToOthersToo) {
  const Json json = Json::parse(serialize_manifest(sealed_manifest()));
  EXPECT_EQ(json["format"], 1);
  EXPECT_EQ(json["phases"][1]["microseconds"], 6300000);
  EXPECT_EQ(json["manifest_xxh3"].get<std::string>().size(), 32U);
}

TEST(Manifest, WritesBytesThatAreNoUtf8AsReplacementCharacters) {
  Manifest manifest = sealed_manifest();
  manifest.processes[0].command = {
      "a\xff"
      "b",
      std::string("nul\0and\x1b[31m", 12)};
  auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(back->processes[0].command[0],
            "a\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(back->processes[0].command[1], manifest.processes[0].command[1]);
}

TEST(Manifest, ACommandOfAnyLengthIsCutForPeople) {
  Manifest manifest = sealed_manifest();
  manifest.processes[0].command.assign(5000, "shard");
  std::string accents(1, 'x');
  while (accents.size() < 100000)
    accents += "\u00e9";
  manifest.processes[1].command = {"train", accents, std::string(100000, '\xff'), "end"};
  auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  const std::vector<std::string>& many = back->processes[0].command;
  EXPECT_EQ(many.size(), 781U);  // 21 of 16384 bytes each, and the mark
  EXPECT_EQ(many.front(), "shard");
  EXPECT_EQ(many.back(), "\u2026");
  const std::vector<std::string>& large = back->processes[1].command;
  ASSERT_EQ(large.size(), 4U);
  EXPECT_EQ(large[1], accents.substr(0, 4095) + "\u2026");
  EXPECT_EQ(large[2].size(), 3 * 4096U + 3);
  EXPECT_EQ(large[3], "end");
}

TEST(Manifest, TheCommandsOfAsManyProcessesAsThereMayBeHaveRoom) {
  Manifest manifest = sealed_manifest();
  ProcessRecord process = manifest.processes[1];
  process.threads.clear();
  process.tcp_ports.clear();
  process.command.assign(4, std::string(200, '\x01'));
  manifest.processes.resize(1);
  for (int i = 1; i < 65536; ++i) {
    process.pid = Pid{1000000 + i};
    manifest.processes.push_back(process);
  }
  EXPECT_LT(serialize_manifest(manifest).size(), manifest_format::kMaxText * 3 / 4);
}

TEST(Manifest, EveryFlippedBitIsFound) {
  const std::string text = serialize_manifest(sealed_manifest());
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    ASSERT_EQ(code_of(damaged), ErrorCode::kImageCorrupt) << "byte " << i;
  }
}

TEST(Manifest, EveryTruncationIsFound) {
  const std::string text = serialize_manifest(sealed_manifest());
  for (std::size_t size = 0; size < text.size(); ++size) {
    ASSERT_EQ(code_of(text.substr(0, size)), ErrorCode::kImageCorrupt) << "size " << size;
  }
  EXPECT_EQ(code_of(text + "\n"), ErrorCode::kImageCorrupt);
}

TEST(Manifest, UnknownFieldsAreIgnored) {
  auto manifest = parse_manifest(changed([](Json& json) {
    json["comment"] = {{"deep", {1, 2, {{"deeper", nullptr}}}}};
    json["processes"][0]["mood"] = "good";
    json["criu_options"]["new_option"] = true;
  }));
  ASSERT_TRUE(manifest) << manifest.error().to_string();
  EXPECT_EQ(*manifest, sealed_manifest());
}

TEST(Manifest, ANewerFormatIsNamedAndNothingElseIsJudged) {
  const std::string text = close_manifest_text(R"({"format": 7, "requires": []})");
  auto manifest = parse_manifest(text);
  ASSERT_FALSE(manifest);
  EXPECT_EQ(manifest.error().code, ErrorCode::kImageVersion);
  EXPECT_NE(manifest.error().message.find("format 7"), std::string::npos);
  auto feature = parse_manifest(changed([](Json& json) { json["requires"] = {"gpu-pages"}; }));
  ASSERT_FALSE(feature);
  EXPECT_EQ(feature.error().code, ErrorCode::kImageVersion);
  EXPECT_NE(feature.error().message.find("gpu-pages"), std::string::npos);
}

TEST(Manifest, ContentAndTheWordForItGoTogether) {
  const auto message = [](const auto& change) {
    const auto manifest = parse_manifest(changed(change));
    return manifest ? "taken" : manifest.error().message;
  };
  EXPECT_THAT(message([](Json& json) { json["requires"] = Json::array(); }),
              testing::HasSubstr("do not agree about gpu-content"));
  EXPECT_THAT(message([](Json& json) { json.erase("gpu_content"); }),
              testing::HasSubstr("do not agree about gpu-content"));
  EXPECT_THAT(message([](Json& json) {
                json["gpu_content"]["data_sizes"] = {4096, -1};
              }),
              testing::HasSubstr("data_sizes"));
  EXPECT_THAT(message([](Json& json) { json["gpu_content"]["taken_files"] = 3; }),
              testing::HasSubstr("taken_files is 3, not within 0..2"));
  EXPECT_THAT(message([](Json& json) { json["gpu_content"]["index_size"] = 1001; }),
              testing::HasSubstr("total_bytes is"));
  EXPECT_THAT(message([](Json& json) {
                json.erase("gpu_content");
                json["requires"] = {"host-memory"};
                json["total_bytes"] = 4096 + (std::uint64_t{1} << 34) + 500 + 8192;
              }),
              "taken");
  EXPECT_THAT(message([](Json& json) { json["requires"] = {"gpu-content"}; }),
              testing::HasSubstr("do not agree about host-memory"));
  EXPECT_THAT(message([](Json& json) {
                json.erase("host_content");
                json["requires"] = {"gpu-content"};
                json["total_bytes"] =
                    4096 + (std::uint64_t{1} << 34) + 1000 + (std::uint64_t{1} << 35) + 4096;
              }),
              "taken");
}

TEST(Manifest, EveryFieldIsNeededAndHasItsType) {
  const Json whole = Json::parse(serialize_manifest(sealed_manifest()));
  int tried = 0;
  // Walks the document; at each place removes it, then puts each wrong kind of value there.
  std::set<std::string> places;
  const auto flat = whole.flatten();
  for (const auto& [key, value] : flat.items()) {
    for (Json::json_pointer place(key); !place.empty(); place.pop_back())
      places.insert(place.to_string());
  }
  for (const auto& name : places) {
    const Json::json_pointer place(name);
    if (place.back() == "manifest_xxh3") continue;
    for (const Json& wrong : {Json(), Json(-1), Json(1.5), Json("?"), Json::array({Json()}),
                              Json(Json::object()), Json(std::uint64_t{1} << 60), Json(true)}) {
      if (wrong.type() == whole[place].type()) continue;
      if (wrong.is_number_integer() && whole[place].is_number_unsigned() && wrong > 0) continue;
      const std::string text = changed([&](Json& json) { json[place] = wrong; });
      ASSERT_EQ(code_of(text), ErrorCode::kImageCorrupt) << place.to_string() << " = " << wrong;
      ++tried;
    }
    const std::string parent = place.parent_pointer().to_string();
    // Older images have none.
    const std::set<std::string> later{"threads", "tcp_ports", "beside", "begins_microseconds"};
    const bool may_miss = later.contains(place.back());
    if (whole[place.parent_pointer()].is_object() && !may_miss) {
      const std::string text =
          changed([&](Json& json) { json[place.parent_pointer()].erase(place.back()); });
      ASSERT_EQ(code_of(text), ErrorCode::kImageCorrupt) << "without " << place.to_string();
      ++tried;
    }
  }
  EXPECT_GT(tried, 300);
}

TEST(Manifest, ThreadNumbersMayMissAndNeverStandTwice) {
  auto without = parse_manifest(changed([](Json& j) { j["processes"][0].erase("threads"); }));
  ASSERT_TRUE(without) << without.error().to_string();
  EXPECT_TRUE(without->processes[0].threads.empty());
  for (const Json& wrong : {Json{102, 102}, Json{101}, Json{100}, Json{0}, Json{4194305}}) {
    EXPECT_EQ(code_of(changed([&](Json& j) { j["processes"][0]["threads"] = wrong; })),
              ErrorCode::kImageCorrupt)
        << wrong;
  }
  // More than a reader takes: the list is left out, and the image stays readable.
  Manifest manifest = sealed_manifest();
  manifest.processes[0].threads.clear();
  for (int i = 1000; i < 1000 + 65537; ++i)
    manifest.processes[0].threads.push_back(Tid{i});
  auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_TRUE(back->processes[0].threads.empty());
}

TEST(Manifest, KnowsTheJobThatItIsOf) {
  Manifest manifest = sealed_manifest();
  manifest.job = {{"python3", "train.py"}, {"pipe:[11]", "pipe:[12]", "pipe:[13]"}};
  const auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, manifest);
  manifest.job->streams.emplace_back("pipe:[14]");
  EXPECT_FALSE(parse_manifest(serialize_manifest(manifest)));
}

TEST(Manifest, KnowsThePartOfAGroup) {
  Manifest manifest = sealed_manifest();
  manifest.group = {"6f1e", 3, "node-1"};
  auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, manifest);
  manifest.group->links = {"10.0.0.1:7000 10.0.0.2:41000"};
  manifest.group->closing_links = {"10.0.0.1:7000 10.0.0.3:41000"};
  manifest.group->links_may_lead_out = true;
  back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, manifest);
  // A reader that knows nothing of them would restore sockets that stay locked.
  Json json = Json::parse(serialize_manifest(manifest));
  json.erase("manifest_xxh3");
  EXPECT_NE(json["requires"].dump().find("group-links"), std::string::npos);
  json["requires"] = Json::array();
  EXPECT_FALSE(parse_manifest(close_manifest_text(json.dump())));
  manifest.group->parts = 2000;
  EXPECT_FALSE(parse_manifest(serialize_manifest(manifest)));
}

TEST(Manifest, KnowsTheStateOfSockets) {
  Manifest manifest = sealed_manifest();
  SocketRecord socket{manifest.root, 5, 2, 2, 17, {}, {}};
  socket.options.push_back({1, 12, std::string("\x06\0\0\0", 4)});
  socket.options.push_back({41, 17, "lo"});
  socket.options.push_back({0, 4, {}});
  socket.memberships.push_back({"lo", "224.1.1.1", true, {"127.0.0.1"}});
  socket.mode = 0600;
  socket.uid = 0;
  socket.gid = 4294967294U;
  socket.peer_groups = 0;
  manifest.sockets = {{"10.99.0.1"}, {"10.99.0.2"}, {socket}, {"process 1 (descriptor 5): events"}};
  const auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, manifest);
  const std::string text = serialize_manifest(manifest);
  const auto with_option = [&](const std::string& option) {
    Json json = Json::parse(text);
    json.erase("manifest_xxh3");
    json["socket_state"]["sockets"][0]["options"] = {option};
    return parse_manifest(close_manifest_text(json.dump())).has_value();
  };
  EXPECT_TRUE(with_option("1:12:06000000"));
  for (const char* wrong : {"", "1", "1:12", "1:12:0", "1:12:0g", "-1:12:00", "1:-12:00", "1::00",
                            "1:99999999999:00", " 1:12:00"})
    EXPECT_FALSE(with_option(wrong)) << wrong;
  EXPECT_FALSE(with_option("1:12:" + std::string(130, '0')));
}

TEST(Manifest, KnowsWhichDataFilesAreOfAnEarlierImage) {
  Manifest manifest = sealed_manifest();
  EXPECT_EQ(manifest.content->reused_bytes(), 0U);
  manifest.content->reused_files = 1;
  const auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, manifest);
  EXPECT_EQ(back->content->reused_bytes(), 4096U);
  manifest.content->reused_files = 3;
  EXPECT_FALSE(parse_manifest(serialize_manifest(manifest)));
}

TEST(Manifest, PortsMayMiss) {
  auto without = parse_manifest(changed([](Json& j) { j["processes"][0].erase("tcp_ports"); }));
  ASSERT_TRUE(without) << without.error().to_string();
  EXPECT_TRUE(without->processes[0].tcp_ports.empty());
  for (const Json& wrong : {Json{0}, Json{65536}}) {
    EXPECT_EQ(code_of(changed([&](Json& j) { j["processes"][0]["tcp_ports"] = wrong; })),
              ErrorCode::kImageCorrupt)
        << wrong;
  }
}

TEST(Manifest, WhatTheKernelKeepsComesBackAndMayMiss) {
  Manifest manifest = sealed_manifest();
  KernelStateRecord state;
  state.core_dump_filter = 0x7b;
  state.threads = {
      {Tid{100}, "0-3,7", 2 << 13 | 6, 123456, "bind:0-1", 0x40000, "early", 5'000'000, 100, 700},
      {Tid{102}, "", 0, 50000, "default", 0, "late"}};
  state.own = {std::uint64_t{1} << 63 | 1 << 18, 3, 6, true};
  state.own.locked = {{0x7f0000000000, 1 << 20}};
  state.own.futex_slots = 0;
  state.autogroup_nice = -7;
  state.audit_session = 12;
  state.timers = {{5, 0, 3, 1'000'000, 7'000'000'000, 0, 1'795'680'855'000'000},
                  {6, 1, 0, 0, 20'000'000, 12, 104'000'000'000}};
  state.files = {{7, true},
                 {8, false, 50, 16, true},
                 {9, false, 0, 0, false, "", true, 102},
                 {10, true, 0, 0, false, std::string(72, 'a')},
                 {11, false, 0, 0, false, "", false, 0, 0, 0640, 12, 34},
                 {12, false, 0, 0, false, "", false, 0, 0, {}, {}, {}, true, true, 12345, 23456}};
  manifest.processes[0].kernel_state = state;
  manifest.processes[1].kernel_state.emplace();
  const auto back = parse_manifest(serialize_manifest(manifest));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, manifest);
  const Json json = Json::parse(serialize_manifest(manifest));
  const auto with = [&](auto change) {
    Json changed_state = json["processes"][0]["kernel_state"];
    change(changed_state);
    return code_of(changed([&](Json& j) { j["processes"][0]["kernel_state"] = changed_state; }));
  };
  for (const char* key : {"tid", "cpus", "io_priority", "timer_slack", "memory_policy",
                          "personality", "machine_check", "slice", "least_load", "most_load"}) {
    EXPECT_EQ(with([&](Json& j) { j["threads"][0][key] = -1; }), ErrorCode::kImageCorrupt) << key;
  }
  for (const auto& item : json["processes"][0]["kernel_state"]["timers"][0].items()) {
    const std::string key = item.key();  // a structured binding cannot be captured
    EXPECT_EQ(with([&](Json& j) { j["timers"][0].erase(key); }), ErrorCode::kImageCorrupt) << key;
    EXPECT_EQ(with([&](Json& j) { j["timers"][0][key] = -1; }), ErrorCode::kImageCorrupt) << key;
  }
  for (const char* key : {"fd", "exclusive", "poll_microseconds", "poll_budget", "poll_prefer",
                          "locked_settings", "signals", "owner_thread", "mode", "uid", "gid",
                          "stopped", "stop_typed", "in_speed", "out_speed"})
    EXPECT_EQ(with([&](Json& j) { j["files"][0][key] = -1; }), ErrorCode::kImageCorrupt) << key;
  EXPECT_EQ(with([](Json& j) { j["files"][0]["poll_budget"] = 65536; }), ErrorCode::kImageCorrupt);
  for (const std::string& text : {std::string(72, 'x'), std::string(70, '0')})
    EXPECT_EQ(with([&](Json& j) { j["files"][0]["locked_settings"] = text; }),
              ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j["threads"][1]["tid"] = 100; }), ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j["threads"][0]["memory_policy"] = std::string(4097, 'x'); }),
            ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j["timers"][0]["flags"] = 4; }), ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j["core_dump_filter"] = std::uint64_t{1} << 32; }),
            ErrorCode::kImageCorrupt);
  for (const char* key :
       {"processor_state", "deny_new_code", "lock_new", "merge_memory", "advised_huge_pages",
        "futex_slots", "listeners", "autogroup_nice", "locked", "audit_session"})
    EXPECT_EQ(with([&](Json& j) { j[key] = -1; }), ErrorCode::kImageCorrupt) << key;
  EXPECT_EQ(with([](Json& j) { j["processor_state"] = {64}; }), ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j["futex_slots"] = (1 << 20) + 1; }), ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j["lock_new"] = 8; }), ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j["autogroup_nice"] = 41; }), ErrorCode::kImageCorrupt);
  EXPECT_EQ(with([](Json& j) { j.erase("threads"); }), ErrorCode::kImageCorrupt);
}

// A value of each kind that is not the default.
void change(bool& value) { value = !value; }
void change(std::uint32_t& value) { value = 0xffffffff; }
void change(std::string& value) { value = "apparmor:other"; }
void change(std::vector<std::string>& value) { value = {"mnt[/data]:data", ""}; }
void change(CgroupMode& value) { value = CgroupMode::kStrict; }
void change(NetworkLock& value) { value = NetworkLock::kIptables; }

TEST(Manifest, EveryOptionOfCriuComesBack) {
  std::vector<std::string> keys;
  for_each_criu_option([&](const auto& row) {
    SCOPED_TRACE(row.key);
    keys.emplace_back(row.key);
    Manifest manifest = sealed_manifest();
    manifest.criu_options = {};
    change(manifest.criu_options.*row.field);
    EXPECT_NE(manifest.criu_options, CriuOptions());
    const auto back = parse_manifest(serialize_manifest(manifest));
    ASSERT_TRUE(back) << back.error().to_string();
    EXPECT_EQ(back->criu_options, manifest.criu_options);
    EXPECT_EQ(code_of(changed([&](Json& j) { j["criu_options"].erase(row.key); })),
              ErrorCode::kImageCorrupt);
    EXPECT_EQ(code_of(changed([&](Json& j) { j["criu_options"][row.key] = -1; })),
              ErrorCode::kImageCorrupt);
  });
  // The format of the image: neither a name nor the order may change.
  EXPECT_THAT(keys, testing::ElementsAre("shell_job", "tcp_established", "tcp_close", "file_locks",
                                         "link_remap", "ext_unix_sk", "unprivileged", "ghost_limit",
                                         "external", "cgroups", "network_lock", "lsm_profile"));
}

template <class Choice>
void expect_names_come_back(const std::vector<std::string>& names) {
  EXPECT_EQ(choice_names<Choice>(), names);
  for (const std::string& name : names) {
    const auto value = choice_from_name<Choice>(name);
    ASSERT_TRUE(value) << name;
    EXPECT_EQ(choice_name(*value), name);
  }
  EXPECT_FALSE(choice_from_name<Choice>("other"));
}

TEST(Manifest, ChoicesOfCriuHaveCriusNames) {
  expect_names_come_back<CgroupMode>({"ignore", "none", "props", "soft", "full", "strict"});
  expect_names_come_back<NetworkLock>({"iptables", "nftables", "skip"});
}

TEST(Manifest, PathsThatLeadElsewhereAreRefused) {
  const std::string long_name(256, 'x');
  for (const std::string& path :
       {std::string("/etc/passwd"), std::string("../x"), std::string("criu/../x"),
        std::string("criu/.."), std::string("criu/."), std::string("criu/"), std::string("criu"),
        std::string("criu//x"), std::string("criu/a/b"), std::string("log/dump.log"),
        std::string("manifest.json"), std::string("./criu/x"), std::string("criu/a\nb"),
        std::string("criu/a\0b", 8), std::string(), "criu/" + long_name, std::string("criux/y")}) {
    const std::string text = changed([&](Json& json) { json["files"][0]["path"] = path; });
    EXPECT_EQ(code_of(text), ErrorCode::kImageCorrupt) << path;
  }
}

TEST(Manifest, FieldsMustFitEachOther) {
  const auto corrupt = [](auto change) { return code_of(changed(change)); };
  const ErrorCode bad = ErrorCode::kImageCorrupt;
  EXPECT_EQ(corrupt([](Json& j) { j["total_bytes"] = 1; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["files"][1]["path"] = "criu/core-100.img"; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { std::swap(j["files"][0], j["files"][1]); }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["files"] = Json::array(); }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["processes"] = Json::array(); }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["root_pid"] = 102; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["root_pid"] = 101; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["root_pid"] = 4194305; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["processes"][1]["pid"] = 100; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["processes"][1]["parent_pid"] = 99; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["processes"][1]["parent_pid"] = j["processes"][1]["pid"]; }),
            bad);
  EXPECT_EQ(corrupt([](Json& j) {
              for (const int pid : {102, 103}) {
                j["processes"].push_back(j["processes"][1]);
                j["processes"].back()["pid"] = pid;
                j["processes"].back()["parent_pid"] = 205 - pid;
              }
              j["processes"][0].erase("threads");
            }),
            bad);
  EXPECT_EQ(corrupt([](Json& j) { j["processes"][1]["cuda_state"] = "running"; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["processes"][0]["cuda_state"] = "failed"; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["processes"][0]["gpu_memory"][0]["gpu_uuid"] = "?"; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["gpus"][1]["uuid"] = "GPU-0"; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["criu_options"]["ghost_limit"] = 1ULL << 32; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["files"][0]["checksum"] = std::string(32, 'A'); }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["created"] = "yesterday"; }), bad);
  EXPECT_EQ(corrupt([](Json& j) { j["checksum"]["block_size"] = 4096; }), bad);
}

TEST(Manifest, AKeyThatStandsTwiceAndDeepNestingAreRefused) {
  std::string text = serialize_manifest(sealed_manifest());
  text.replace(0, 1, "{\n  \"format\": 1,");
  text.resize(text.size() - manifest_format::kTrailerSize);
  text += "  \"end\": 0\n}";
  EXPECT_EQ(code_of(close_manifest_text(text)), ErrorCode::kImageCorrupt);

  std::string deep = R"({"format": 1, "x": )";
  deep += std::string(100000, '[') + std::string(100000, ']') + "}";
  EXPECT_EQ(code_of(close_manifest_text(deep)), ErrorCode::kImageCorrupt);
  EXPECT_EQ(code_of(close_manifest_text("{}")), ErrorCode::kImageCorrupt);
  EXPECT_EQ(code_of(close_manifest_text("[]")), ErrorCode::kImageCorrupt);
  EXPECT_EQ(code_of(close_manifest_text("")), ErrorCode::kImageCorrupt);
}

// Random damage under a right checksum: whatever comes out, it is an answer and no crash, and what
// is accepted can be written and read again.
TEST(Manifest, SurvivesMutations) {
  std::mt19937 random(20261121);
  const std::string whole = serialize_manifest(sealed_manifest());
  const std::string body = whole.substr(0, whole.size() - manifest_format::kTrailerSize - 2);
  const std::vector<std::string> words = {
      "{",    "}",       "[",    "]",  ",", ":", "\"", "-", "0", "1e999", "18446744073709551616",
      "null", "\\u0000", "\xff", "../"};
  int accepted = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string text = body;
    const unsigned changes = 1 + random() % 4;
    for (unsigned i = 0; i < changes; ++i) {
      const std::size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, random() % 20);
          break;
        case 2:
          text.insert(at, words[random() % words.size()]);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 50));
          break;
      }
    }
    auto manifest = parse_manifest(close_manifest_text(text + "\n}"));
    if (!manifest) {
      ASSERT_TRUE(manifest.error().code == ErrorCode::kImageCorrupt ||
                  manifest.error().code == ErrorCode::kImageVersion);
      continue;
    }
    ++accepted;
    auto again = parse_manifest(serialize_manifest(*manifest));
    ASSERT_TRUE(again) << again.error().to_string();
    ASSERT_EQ(*again, *manifest);
  }
  EXPECT_LT(accepted, 4000);
}

}  // namespace
}  // namespace stasis
