#include "cli/ps_question.h"

#include <thread>
#include <utility>

namespace stasis::cli {

void Question::ask(const std::shared_ptr<Question>& question) {
  std::thread([question] {
    auto state = question->process.cuda_state();
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

}  // namespace stasis::cli
