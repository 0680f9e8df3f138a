#include "job/messages.h"

#include <string>

#include <gtest/gtest.h>

namespace stasis::job {
namespace {

class JobMessages : public ::testing::Test {
 protected:
  JobMessages() : ends_(std::move(*Channel::pair())) {}

  Channel::Message arrived() const {
    auto message = ends_.second.receive(0);
    EXPECT_TRUE(message && *message);
    return message && *message ? std::move(**message) : Channel::Message{};
  }
  template <class Kind>
  Kind order_after(const InitOrder& order) const {
    EXPECT_TRUE(send(ends_.first, order));
    const auto back = parse_order(arrived());
    const auto* kind = back ? std::get_if<Kind>(&*back) : nullptr;
    EXPECT_NE(kind, nullptr);
    return kind != nullptr ? *kind : Kind{};
  }
  template <class Kind>
  Kind event_after(const InitEvent& event) const {
    EXPECT_TRUE(send(ends_.first, event));
    const auto back = parse_event(arrived());
    const auto* kind = back ? std::get_if<Kind>(&*back) : nullptr;
    EXPECT_NE(kind, nullptr);
    return kind != nullptr ? *kind : Kind{};
  }
  template <class Kind>
  Kind result_after(const Kind& what) const {
    const auto result = event_after<WorkResult>(WorkResult{what, {"a note"}});
    EXPECT_EQ(result.notes, std::vector<std::string>{"a note"});
    const auto* kind = std::get_if<Kind>(&result.what);
    EXPECT_NE(kind, nullptr);
    return kind != nullptr ? *kind : Kind{};
  }

  std::pair<Channel, Channel> ends_;
};

TEST_F(JobMessages, OrdersArriveAsTheyWereSent) {
  (void)order_after<StartJob>(StartJob{});
  (void)order_after<StopWorker>(StopWorker{});
  (void)order_after<KillWorker>(KillWorker{});
  const auto signal = order_after<SendSignal>(SendSignal{15, true});
  EXPECT_EQ(signal.number, 15);
  EXPECT_TRUE(signal.group);
  const auto size = order_after<Resize>(Resize{24, 80});
  EXPECT_EQ(size.rows, 24);
  EXPECT_EQ(size.columns, 80);
}

TEST_F(JobMessages, WorkArrivesAsItWasOrdered) {
  const auto recover = order_after<WorkOrder>(WorkOrder{RecoverOrder{}, Pid{5000}});
  EXPECT_TRUE(std::holds_alternative<RecoverOrder>(recover.what));
  EXPECT_EQ(recover.root, Pid{5000});
  const auto restore = order_after<WorkOrder>(WorkOrder{RestoreOrder{"/ima\xe9/000001"}});
  ASSERT_TRUE(std::holds_alternative<RestoreOrder>(restore.what));
  EXPECT_EQ(std::get<RestoreOrder>(restore.what).images_dir, "/ima\xe9/000001");
  // Paths that are no UTF-8, too.
  SaveOrder order{
      "/ima\xe9/000002", {"train", "--fast"}, true, std::chrono::seconds(5), "/bas\xe9"};
  const auto save = order_after<WorkOrder>(WorkOrder{order});
  ASSERT_TRUE(std::holds_alternative<SaveOrder>(save.what));
  const auto& back = std::get<SaveOrder>(save.what);
  EXPECT_EQ(back.images_dir, order.images_dir);
  EXPECT_EQ(back.command, order.command);
  EXPECT_TRUE(back.end);
  EXPECT_EQ(back.limit, order.limit);
  EXPECT_EQ(back.base, order.base);
}

TEST_F(JobMessages, EventsArriveAsTheyWereSent) {
  (void)event_after<Ready>(Ready{});
  const auto started = event_after<Started>(Started{Pid{5000}, 7});
  EXPECT_EQ(started.root, Pid{5000});
  EXPECT_EQ(started.terminal, 7U);
  EXPECT_EQ(event_after<NotStarted>(NotStarted{2}).error_number, 2);
  EXPECT_EQ(event_after<Ended>(Ended{256}).status, 256);
  const Error error{ErrorCode::kNoSpace, "no room", "make some"};
  const auto failed = event_after<Failed>(Failed{error});
  EXPECT_EQ(failed.error.code, ErrorCode::kNoSpace);
  EXPECT_EQ(failed.error.remedy, "make some");
}

TEST_F(JobMessages, ResultsArriveAsTheWorkerGaveThem) {
  (void)result_after(Recovered{});
  (void)result_after(WasSuspended{});
  EXPECT_EQ(result_after(WorkerDied{"was killed"}).how, "was killed");
  const auto restored = result_after(Restored{Pid{5000}, 1.5, 3});
  EXPECT_EQ(restored.root, Pid{5000});
  EXPECT_EQ(restored.seconds, 1.5);
  EXPECT_EQ(restored.terminal, 3U);
  const auto saved = result_after(Saved{"3 MiB", 2.5, 0.5});
  EXPECT_EQ(saved.size, "3 MiB");
  EXPECT_EQ(saved.downtime, 0.5);
  EXPECT_FALSE(result_after(Saved{"3 MiB", 2.5, {}}).downtime);
  EXPECT_EQ(result_after(Error{ErrorCode::kBusy, "in use", {}}).code, ErrorCode::kBusy);
}

TEST_F(JobMessages, AResultThatIsTooLongLosesItsNotesAndTheEndOfItsError) {
  const std::string much(Channel::kMostBytes, 'x');
  const auto result =
      event_after<WorkResult>(WorkResult{Error{ErrorCode::kCriuFailed, much, much}, {much}});
  ASSERT_TRUE(std::holds_alternative<Error>(result.what));
  EXPECT_EQ(std::get<Error>(result.what).code, ErrorCode::kCriuFailed);
  EXPECT_TRUE(std::get<Error>(result.what).message.starts_with("xxx"));
  EXPECT_TRUE(result.notes.empty());
}

TEST_F(JobMessages, WhatIsMalformedIsNone) {
  for (const std::string& text :
       std::vector<std::string>{"[]", "{}", R"({"event": 1})", R"({"do": "work"})",
                                R"({"do": "signal", "number": "x", "group": true})"}) {
    ASSERT_TRUE(ends_.first.send(std::as_bytes(std::span(text)), {}));
    const auto message = arrived();
    EXPECT_FALSE(parse_order(message)) << text;
    EXPECT_FALSE(parse_event(message)) << text;
  }
}

}  // namespace
}  // namespace stasis::job
