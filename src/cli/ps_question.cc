#include "cli/ps_question.h"

#include <thread>
#include <utility>

namespace stasis::cli {

void Question::ask(const std::shared_ptr<Question>& question, Clock::time_point until) {
  std::thread([question, until] {
    question->probe(until, true);
    auto state = question->process.cuda_state();
    question->probe(until, false);
    const std::scoped_lock lock(question->mutex);
    question->answer.emplace(std::move(state));
    question->answered.notify_one();
  }).detach();
}

std::optional<Result<std::optional<CudaState>>> Question::wait(Clock::time_point until) {
  std::unique_lock lock(mutex);
  answered.wait_until(lock, until, [this] { return answer.has_value(); });
  return answer;
}

void Question::probe(Clock::time_point until, bool before) {
  const auto seen = direct::probe_agent(process.pid(), until);
  const std::scoped_lock lock(mutex);
  if (before) agent_.away_before = seen && *seen && direct::is_away((*seen)->state);
  if (seen) agent_.seen = *seen;
}

Question::Agent Question::agent() {
  const std::scoped_lock lock(mutex);
  return agent_;
}

}  // namespace stasis::cli
