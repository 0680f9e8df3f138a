#include "tests/workloads/state_probe.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

namespace stasis::workloads {

std::string because(const std::string& what) { return what + ": " + std::strerror(errno); }

Problem answer(long result, const std::string& what) {
  return result < 0 ? Problem(because(what)) : std::nullopt;
}

Worker::Worker()
    : thread_([this] {
        std::unique_lock lock(mutex_);
        for (;;) {
          changed_.wait(lock, [this] { return work_ != nullptr || stop_; });
          if (stop_) return;
          (*work_)();
          work_ = nullptr;
          changed_.notify_all();
        }
      }) {}

Worker::~Worker() {
  const std::scoped_lock lock(mutex_);
  stop_ = true;
  changed_.notify_all();
}

void Worker::run(const std::function<void()>& work) {
  std::unique_lock lock(mutex_);
  work_ = &work;
  changed_.notify_all();
  changed_.wait(lock, [this] { return work_ == nullptr; });
}

void Probe::add(const char* subject, const char* name, const std::function<Problem()>& set,
                const std::function<std::string()>& get) {
  auto before = std::make_shared<std::string>();
  add_check(
      subject, name,
      [=] {
        Problem unset = set();
        *before = get();
        return unset;
      },
      [=]() -> Problem {
        const std::string now = get();
        if (now == *before) return std::nullopt;
        return "was " + *before + ", is " + now;
      });
}

void Probe::add_for_thread(const char* subject, const char* name,
                           const std::function<Problem()>& set,
                           const std::function<std::string()>& get) {
  add_in(worker_, subject, name, set, get);
}

void Probe::add_for_own_thread(const char* subject, const char* name,
                               const std::function<Problem()>& set,
                               const std::function<std::string()>& get) {
  add_in(*new Worker, subject, name, set, get);  // NOLINT: needed to the end
}

void Probe::add_in(Worker& worker, const char* subject, const char* name,
                   const std::function<Problem()>& set, const std::function<std::string()>& get) {
  add(
      subject, name,
      [&worker, set] {
        Problem unset;
        worker.run([&] { unset = set(); });
        return unset;
      },
      [&worker, get] {
        std::string now;
        worker.run([&] { now = get(); });
        return now;
      });
}

void Probe::add_check(const char* subject, const char* name, const std::function<Problem()>& set,
                      std::function<Problem()> check) {
  items_.push_back({subject, name, set(), std::move(check)});
}

void Probe::add_call(const char* name, const std::function<long()>& call) {
  struct Seen {
    std::atomic<bool> returned{false};
    std::string how;
  };
  auto seen = std::make_shared<Seen>();
  add_check(
      "system calls that wait", name,
      [=] {
        std::thread([=] {
          sigset_t all;
          sigfillset(&all);
          pthread_sigmask(SIG_SETMASK, &all, nullptr);
          errno = 0;
          const long result = call();
          seen->how = "returned " + std::to_string(result) + ", " + because("errno");
          seen->returned = true;
        }).detach();
        return Problem();
      },
      [=] { return seen->returned ? Problem(seen->how) : std::nullopt; });
}

std::string Probe::report() {
  std::string text;
  for (const Item& item : items_) {
    const Problem lost = item.unset ? std::nullopt : item.check();
    text += item.unset ? "not settable here" : lost ? "lost" : "kept";
    text += std::string("\t") + item.subject + "\t" + item.name;
    if (item.unset || lost) text += "\t" + (lost ? *lost : *item.unset);
    text += "\n";
  }
  return text;
}

}  // namespace stasis::workloads
