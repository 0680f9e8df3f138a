// The part of the Python package that calls libstasis, by its C interface and nothing else: so
// it can be compiled for any Python against a library that is there already (python/build-package).
// What people use stands in python/stasis/.
//
// Every call of the library is made in a thread of its own, with all signals blocked, while the
// thread of Python that asked for it waits without the GIL. Every 50 ms that one looks for signals
// as only it can, so that Ctrl-C is answered, and hands out what the call had to tell.
// Long because pybind11 wants one module in one place, and every class in it waits for its calls in
// the same way.
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "stasis/stasis.h"

namespace py = pybind11;

namespace {

constexpr std::chrono::milliseconds kPollInterval{50};

// A process by its number, or a job by its name.
using Target = std::variant<int, std::string>;

using Pairs = std::vector<std::pair<std::string, std::string>>;

// Makes an exception of (code, message, remedy, driver number, name, text); set by the package.
// Never destroyed: at the end of the program the interpreter is gone before it.
py::object& error_factory() {
  static auto* const factory = new py::object;
  return *factory;
}

// For people. Not every text is UTF-8: a file's name need not be.
py::object text(const char* from) {
  return py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      from, static_cast<Py_ssize_t>(std::char_traits<char>::length(from)), "backslashreplace"));
}

[[noreturn]] void raise(stasis_error* error) {
  const char* code = stasis_code_name(stasis_error_code(error));
  char* const json = stasis_error_json(error);
  const py::object as_json = text(json == nullptr ? "{}" : json);
  stasis_free(json);
  py::object exception = error_factory()(
      code == nullptr ? "internal" : code, text(stasis_error_message(error)),
      text(stasis_error_remedy(error)), stasis_error_driver_number(error),
      text(stasis_error_driver_name(error)), text(stasis_error_driver_text(error)), as_json);
  stasis_error_free(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

// What a call tells while it is under way, kept until the waiting thread comes to look.
struct Told {
  struct Progress {
    std::string phase;
    std::uint64_t done;
    std::uint64_t total;
  };
  std::mutex mutex;
  std::condition_variable over;
  bool finished = false;
  std::vector<Progress> progress;
  std::vector<std::string> notes;

  // From threads of the library, which must not see an exception.
  static void on_progress(const char* phase, std::uint64_t done, std::uint64_t total, void* told) {
    auto* self = static_cast<Told*>(told);
    try {
      const std::lock_guard lock(self->mutex);
      self->progress.push_back({phase, done, total});
    } catch (
        ...) {  // NOLINT(bugprone-empty-catch): no memory for it, and nothing is lost but a word
    }
  }
  static void on_note(const char* text, void* told) {
    auto* self = static_cast<Told*>(told);
    try {
      const std::lock_guard lock(self->mutex);
      self->notes.emplace_back(text);
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
  }
};

struct Callbacks {
  py::object progress = py::none();
  py::object note = py::none();
};

void hand_out(Told& told, const Callbacks& callbacks) {
  std::vector<Told::Progress> progress;
  std::vector<std::string> notes;
  {
    const std::lock_guard lock(told.mutex);
    progress.swap(told.progress);
    notes.swap(told.notes);
  }
  if (!callbacks.progress.is_none()) {
    for (const Told::Progress& one : progress)
      callbacks.progress(one.phase, one.done, one.total);
  }
  if (!callbacks.note.is_none()) {
    for (const std::string& one : notes)
      callbacks.note(text(one.c_str()));
  }
}

using LibraryCall = std::function<stasis_error*(const stasis_call&)>;

// A thread that no signal of this process interrupts: handlers are the waiting thread's.
std::thread start_apart(const std::function<void()>& work) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(work);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

enum class WhenRaised { kStop, kFinish };

// Runs `call` and raises its error. When a signal handler or a callback raises, the call is asked
// to stop, or else finished; that exception goes on when it has ended. `undo` is for a call that
// had just succeeded then.
void run(const LibraryCall& call, const Callbacks& callbacks = {},
         const std::function<void()>& undo = {}, WhenRaised when_raised = WhenRaised::kStop) {
  Told told;
  stasis_call given;
  stasis_call_init(&given, sizeof given);
  given.cancel = stasis_cancel_new();
  if (given.cancel == nullptr) throw std::bad_alloc();
  given.progress = &Told::on_progress;
  given.note = &Told::on_note;
  given.user_data = &told;
  stasis_error* error = nullptr;
  std::thread worker;
  try {
    worker = start_apart([&] {
      error = call(given);
      const std::lock_guard lock(told.mutex);
      told.finished = true;
      told.over.notify_all();
    });
  } catch (const std::system_error&) {
    // No thread to be had: in this one then, deaf to signals. What a `with` statement has to undo
    // is undone all the same.
    const py::gil_scoped_release release;
    error = call(given);
    told.finished = true;
  } catch (...) {
    stasis_cancel_free(given.cancel);
    throw;
  }
  std::optional<py::error_already_set> raised;
  for (bool finished = false; !finished;) {
    {
      const py::gil_scoped_release release;
      std::unique_lock lock(told.mutex);
      finished = told.over.wait_for(lock, kPollInterval, [&] { return told.finished; });
    }
    if (raised) continue;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      hand_out(told, callbacks);
    } catch (py::error_already_set& exception) {
      raised.emplace(std::move(exception));
      if (when_raised == WhenRaised::kStop) stasis_cancel_request(given.cancel);
    }
  }
  {
    const py::gil_scoped_release release;
    if (worker.joinable()) worker.join();
    // Told to stop just after it had looked for the last time.
    if (raised && error == nullptr && undo) undo();
  }
  stasis_cancel_free(given.cancel);
  if (!raised) {
    if (error != nullptr) raise(error);
    return;
  }
  if (error == nullptr || stasis_error_code(error) == STASIS_INTERRUPTED) {
    stasis_error_free(error);
    throw std::move(*raised);
  }
  // Something went wrong besides: that is what people have to know, and why it was stopped.
  try {
    raise(error);
  } catch (py::error_already_set& exception) {
    PyObject* value = exception.value().ptr();
    PyException_SetContext(value, raised->value().inc_ref().ptr());
    exception.restore();
    throw py::error_already_set();
  }
}

std::vector<stasis_gpu_pair> c_pairs(const Pairs& pairs) {
  std::vector<stasis_gpu_pair> out;
  out.reserve(pairs.size());
  for (const auto& [from, to] : pairs)
    out.push_back({from.c_str(), to.c_str()});
  return out;
}

std::vector<const char*> c_strings(const std::vector<std::string>& texts) {
  std::vector<const char*> out;
  out.reserve(texts.size());
  for (const std::string& text : texts)
    out.push_back(text.c_str());
  return out;
}

const char* c_string(const std::optional<std::string>& text) {
  return text ? text->c_str() : nullptr;
}

// What the library has given, given back on every way out, also where a constructor raises.
template <class T, void (*give_back)(T*)>
struct Owned {
  T* it = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { give_back(it); }
};

// Runs a call that gives a text.
std::string run_for_text(const std::function<stasis_error*(const stasis_call&, char**)>& call,
                         const Callbacks& callbacks = {}, const std::function<void()>& undo = {},
                         WhenRaised when_raised = WhenRaised::kStop) {
  Owned<char, stasis_free> text;
  run([&](const stasis_call& given) { return call(given, &text.it); }, callbacks, undo,
      when_raised);
  return text.it == nullptr ? "" : text.it;
}

// Calls the function for a number, or that for a name.
template <class ByNumber, class ByName>
stasis_error* call_for(const Target& target, ByNumber by_number, ByName by_name) {
  if (const int* pid = std::get_if<int>(&target)) return by_number(*pid);
  return by_name(std::get<std::string>(target).c_str());
}

std::string word_for(const Target& target) {
  if (const int* pid = std::get_if<int>(&target)) return std::to_string(*pid);
  return std::get<std::string>(target);
}

class Process {
 public:
  Process(stasis_session* session, int pid) {
    run([&](const stasis_call&) { return stasis_process_open(session, pid, &process_.it); });
  }

  std::string state() {
    stasis_state state{};
    run([&](const stasis_call&) { return stasis_process_state(process_.it, &state); });
    const char* name = stasis_state_name(state);
    return name == nullptr ? "failed" : name;
  }
  int restore_thread_id() {
    int thread = 0;
    run([&](const stasis_call&) { return stasis_process_restore_thread_id(process_.it, &thread); });
    return thread;
  }
  void lock(std::uint32_t timeout_ms) {
    run(
        [&](const stasis_call& given) {
          return stasis_process_lock(process_.it, timeout_ms, &given);
        },
        {}, [&] { stasis_error_free(stasis_process_unlock(process_.it)); });
  }
  void checkpoint() {
    run([&](const stasis_call&) { return stasis_process_checkpoint(process_.it); });
  }
  void restore(const Pairs& pairs) {
    const auto given = c_pairs(pairs);
    run([&](const stasis_call&) {
      return stasis_process_restore(process_.it, given.data(), given.size());
    });
  }
  void unlock() {
    run([&](const stasis_call&) { return stasis_process_unlock(process_.it); });
  }
  void bring_to_running() {
    run([&](const stasis_call&) {
      return stasis_process_bring_to(process_.it, STASIS_RUNNING, 0);
    });
  }

 private:
  Owned<stasis_process, stasis_process_close> process_;
};

class Group {
 public:
  Group(stasis_session* session, int pid) {
    run([&](const stasis_call&) { return stasis_group_open(session, pid, &group_.it); });
  }

  std::string members() {
    return run_for_text(
        [&](const stasis_call&, char** text) { return stasis_group_members(group_.it, text); });
  }
  void lock(std::uint32_t timeout_ms) {
    run([&](const stasis_call& given) { return stasis_group_lock(group_.it, timeout_ms, &given); },
        {}, [&] { stasis_error_free(stasis_group_unlock(group_.it)); });
  }
  void checkpoint(const py::object& progress) {
    run([&](const stasis_call& given) { return stasis_group_checkpoint(group_.it, &given); },
        {progress, py::none()});
  }
  void restore(const Pairs& pairs, const py::object& progress) {
    const auto given_pairs = c_pairs(pairs);
    run(
        [&](const stasis_call& given) {
          return stasis_group_restore(group_.it, given_pairs.data(), given_pairs.size(), &given);
        },
        {progress, py::none()});
  }
  void unlock() {
    run([&](const stasis_call&) { return stasis_group_unlock(group_.it); });
  }

 private:
  Owned<stasis_group, stasis_group_close> group_;
};

// Options of a dump by their names, as the package gives them.
class Options {
 public:
  explicit Options(py::dict given) : given_(std::move(given)) {}
  template <class T>
  void take(const char* name, T& to) {
    if (given_.contains(name)) to = py::cast<T>(given_[name]);
  }
  void take(const char* name, const char*& to) {
    if (!given_.contains(name) || given_[name].is_none()) return;
    texts_.push_back(std::make_unique<std::string>(py::cast<std::string>(given_[name])));
    to = texts_.back()->c_str();
  }
  void take(const char* name, const char* const*& to, std::size_t& count) {
    if (!given_.contains(name)) return;
    lists_.push_back(std::make_unique<std::vector<std::string>>(
        py::cast<std::vector<std::string>>(given_[name])));
    pointers_.push_back(std::make_unique<std::vector<const char*>>(c_strings(*lists_.back())));
    to = pointers_.back()->data();
    count = pointers_.back()->size();
  }

 private:
  py::dict given_;
  std::vector<std::unique_ptr<std::string>> texts_;
  std::vector<std::unique_ptr<std::vector<std::string>>> lists_;
  std::vector<std::unique_ptr<std::vector<const char*>>> pointers_;
};

// Whether graphs_are_safe, and watch_ms; none: the agent is not brought to what runs without it.
using Attach = std::optional<std::pair<bool, std::uint32_t>>;

template <class CallOptions>
void put_attach(const Attach& attach, CallOptions& options) {
  options.attach = attach.has_value();
  if (attach) std::tie(options.graphs_are_safe, options.watch_ms) = *attach;
}

class Session {
 public:
  Session(const std::optional<std::string>& library, std::uint32_t answer_timeout_ms,
          std::uint32_t work_timeout_ms) {
    stasis_session_options options;
    stasis_session_options_init(&options, sizeof options);
    options.library = c_string(library);
    options.answer_timeout_ms = answer_timeout_ms;
    options.work_timeout_ms = work_timeout_ms;
    run([&](const stasis_call&) { return stasis_session_open(&options, &session_.it); });
  }

  std::string driver_version() const { return stasis_session_driver_version(session_.it); }
  int cuda_version() const { return stasis_session_cuda_version(session_.it); }
  bool simulated() const { return stasis_session_is_simulated(session_.it); }

  std::unique_ptr<Process> process(int pid) { return std::make_unique<Process>(session_.it, pid); }
  std::unique_ptr<Group> group(int pid) { return std::make_unique<Group>(session_.it, pid); }

  std::string suspend(const Target& target, std::uint32_t timeout_ms, bool ignore_obstacles,
                      const Attach& attach, const py::object& progress, const py::object& note) {
    stasis_suspend_options options;
    stasis_suspend_options_init(&options, sizeof options);
    options.timeout_ms = timeout_ms;
    options.ignore_obstacles = ignore_obstacles;
    put_attach(attach, options);
    return run_for_text(
        [&](const stasis_call& given, char** text) {
          return call_for(
              target,
              [&](int pid) { return stasis_suspend(session_.it, pid, &options, &given, text); },
              [&](const char* name) {
                return stasis_suspend_job(session_.it, name, &options, &given, text);
              });
        },
        {progress, note},
        [&] {
          stasis_error_free(call_for(
              target,
              [&](int pid) { return stasis_resume(session_.it, pid, nullptr, nullptr, nullptr); },
              [&](const char* name) {
                return stasis_resume_job(session_.it, name, nullptr, nullptr, nullptr);
              }));
        });
  }
  std::string resume(const Target& target, const Pairs& pairs,
                     const std::optional<std::string>& images_dir, std::uint32_t time_limit_ms,
                     const py::object& progress, const py::object& note,
                     WhenRaised when_raised = WhenRaised::kStop) {
    const auto given_pairs = c_pairs(pairs);
    stasis_resume_options options;
    stasis_resume_options_init(&options, sizeof options);
    options.gpu_pairs = given_pairs.data();
    options.gpu_pair_count = given_pairs.size();
    options.time_limit_ms = time_limit_ms;
    options.images_dir = c_string(images_dir);
    return run_for_text(
        [&](const stasis_call& given, char** text) {
          return call_for(
              target,
              [&](int pid) { return stasis_resume(session_.it, pid, &options, &given, text); },
              [&](const char* name) {
                return stasis_resume_job(session_.it, name, &options, &given, text);
              });
        },
        {progress, note}, {}, when_raised);
  }
  std::string swap(const Target& out, const Target& in, const Pairs& pairs,
                   std::uint32_t timeout_ms, bool ignore_obstacles, const Attach& attach,
                   const py::object& note) {
    const auto given_pairs = c_pairs(pairs);
    stasis_swap_options options;
    stasis_swap_options_init(&options, sizeof options);
    options.timeout_ms = timeout_ms;
    options.ignore_obstacles = ignore_obstacles;
    options.gpu_pairs = given_pairs.data();
    options.gpu_pair_count = given_pairs.size();
    stasis_swap_options back = options;
    put_attach(attach, options);
    back.gpu_pairs = nullptr;
    back.gpu_pair_count = 0;
    const int* out_pid = std::get_if<int>(&out);
    const int* in_pid = std::get_if<int>(&in);
    const std::string out_word = word_for(out);
    const std::string in_word = word_for(in);
    const bool numbers = out_pid != nullptr && in_pid != nullptr;
    return run_for_text(
        [&](const stasis_call& given, char** text) {
          return numbers ? stasis_swap(session_.it, *out_pid, *in_pid, &options, &given, text)
                         : stasis_swap_jobs(session_.it, out_word.c_str(), in_word.c_str(),
                                            &options, &given, text);
        },
        {py::none(), note},
        [&] {
          stasis_error_free(
              numbers ? stasis_swap(session_.it, *in_pid, *out_pid, &back, nullptr, nullptr)
                      : stasis_swap_jobs(session_.it, in_word.c_str(), out_word.c_str(), &back,
                                         nullptr, nullptr));
        });
  }
  std::string dump(const Target& target, const py::dict& given_options, const Attach& attach,
                   const py::object& progress, const py::object& note) {
    Options from(given_options);
    stasis_dump_options options;
    stasis_dump_options_init(&options, sizeof options);
    int after = options.after;
    from.take("images_dir", options.images_dir);
    from.take("after", after);
    options.after = static_cast<stasis_after_dump>(after);
    from.take("timeout_ms", options.timeout_ms);
    from.take("overwrite", options.overwrite);
    from.take("sync", options.sync);
    from.take("ignore_obstacles", options.ignore_obstacles);
    from.take("ignore_undumpable", options.ignore_undumpable);
    from.take("criu", options.criu);
    from.take("shell_job", options.shell_job);
    from.take("tcp_established", options.tcp_established);
    from.take("tcp_close", options.tcp_close);
    from.take("file_locks", options.file_locks);
    from.take("link_remap", options.link_remap);
    from.take("ext_unix_sk", options.ext_unix_sk);
    from.take("ghost_limit", options.ghost_limit);
    from.take("manage_cgroups", options.manage_cgroups);
    from.take("network_lock", options.network_lock);
    from.take("external", options.external, options.external_count);
    from.take("compress", options.compress);
    from.take("base", options.base);
    put_attach(attach, options);
    return run_for_text(
        [&](const stasis_call& given, char** text) {
          return call_for(
              target,
              [&](int pid) { return stasis_dump(session_.it, pid, &options, &given, text); },
              [&](const char* name) {
                return stasis_dump_job(session_.it, name, &options, &given, text);
              });
        },
        {progress, note});
  }
  std::string restore(const Pairs& pairs, const std::vector<std::pair<int, std::string>>& inherit,
                      const py::dict& given_options, const py::object& progress,
                      const py::object& note) {
    const auto given_pairs = c_pairs(pairs);
    std::vector<stasis_inherited_fd> inherited;
    inherited.reserve(inherit.size());
    for (const auto& [fd, key] : inherit)
      inherited.push_back({fd, key.c_str()});
    Options from(given_options);
    stasis_restore_options options;
    stasis_restore_options_init(&options, sizeof options);
    options.gpu_pairs = given_pairs.data();
    options.gpu_pair_count = given_pairs.size();
    options.inherit = inherited.data();
    options.inherit_count = inherited.size();
    from.take("images_dir", options.images_dir);
    from.take("leave_suspended", options.leave_suspended);
    from.take("time_limit_ms", options.time_limit_ms);
    from.take("criu", options.criu);
    from.take("external", options.external, options.external_count);
    from.take("tcp_close", options.tcp_close);
    from.take("ext_unix_sk", options.ext_unix_sk);
    from.take("manage_cgroups", options.manage_cgroups);
    from.take("map_addresses", options.map_addresses, options.map_address_count);
    return run_for_text(
        [&](const stasis_call& given, char** text) {
          return stasis_restore(session_.it, &options, &given, text);
        },
        {progress, note});
  }
  std::string recover(const Target& target, const py::object& note,
                      WhenRaised when_raised = WhenRaised::kStop) {
    return run_for_text(
        [&](const stasis_call& given, char** text) {
          return call_for(
              target, [&](int pid) { return stasis_recover(session_.it, pid, &given, text); },
              [&](const char* name) {
                return stasis_recover_job(session_.it, name, &given, text);
              });
        },
        {py::none(), note}, {}, when_raised);
  }

  static std::string inspect(Session* session, const std::string& images_dir, bool verify,
                             const Pairs& pairs, const std::optional<std::string>& criu,
                             const py::object& progress) {
    const auto given_pairs = c_pairs(pairs);
    stasis_inspect_options options;
    stasis_inspect_options_init(&options, sizeof options);
    options.images_dir = images_dir.c_str();
    options.verify = verify;
    options.gpu_pairs = given_pairs.data();
    options.gpu_pair_count = given_pairs.size();
    options.criu = c_string(criu);
    return run_for_text(
        [&](const stasis_call& given, char** text) {
          return stasis_inspect(session == nullptr ? nullptr : session->session_.it, &options,
                                &given, text);
        },
        {progress, py::none()});
  }

 private:
  Owned<stasis_session, stasis_session_close> session_;
};

// What a `with` statement holds. Entering and leaving are calls of C, because the interpreter runs
// signal handlers, which raise, between any two steps of its own: also between the beginning of a
// `finally` and the call in it. What is left here has ended when the handler's exception goes on.
class Scope {
 public:
  using Step = std::function<void()>;
  using Steps = std::vector<Step>;

  // `enter` undoes what it did where it raises, and appends what leaving has to do. Each step is
  // done, whatever the others raise; what is in `gone` is no error.
  Scope(py::object value, py::tuple gone, std::function<void(Steps&)> enter)
      : value_(std::move(value)), gone_(std::move(gone)), enter_(std::move(enter)) {}

  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  // Entered, and never left: a signal came between, where a `with` statement was put together by
  // steps of the interpreter (contextlib.ExitStack).
  ~Scope() {
    if (steps_.empty() || Py_IsInitialized() == 0) return;
    const py::error_scope keep;
    leave_quietly();
  }

  py::object enter() {
    if (!steps_.empty()) throw std::runtime_error("it is entered already");
    owner_ = ::getpid();
    try {
      enter_(steps_);
    } catch (...) {
      leave_quietly();
      throw;
    }
    return value_;
  }

  void leave() {
    Steps steps;
    steps.swap(steps_);
    // In a forked child: it is the parent's to leave.
    if (owner_ != ::getpid()) return;
    std::exception_ptr raised;
    for (const Step& step : steps) {
      try {
        step();
      } catch (py::error_already_set& exception) {
        if (!exception.matches(gone_) && !raised) raised = std::current_exception();
      } catch (...) {
        if (!raised) raised = std::current_exception();
      }
    }
    if (raised) std::rethrow_exception(raised);
  }

 private:
  void leave_quietly() {
    try {
      leave();
    } catch (py::error_already_set& exception) {
      exception.discard_as_unraisable("stasis: undoing what was entered");
    } catch (...) {  // NOLINT(bugprone-empty-catch): no caller is left to tell
    }
  }

  py::object value_;
  py::tuple gone_;
  std::function<void(Steps&)> enter_;
  Steps steps_;
  ::pid_t owner_ = 0;
};

std::unique_ptr<Scope> suspended(py::object value, const py::tuple& gone, Session& session,
                                 const Target& target, std::uint32_t timeout_ms,
                                 bool ignore_obstacles, const Attach& attach, const Pairs& pairs,
                                 const py::object& progress, const py::object& note) {
  return std::make_unique<Scope>(std::move(value), gone, [=, &session](Scope::Steps& steps) {
    (void)session.suspend(target, timeout_ms, ignore_obstacles, attach, progress, note);
    steps.emplace_back([=, &session] {
      (void)session.resume(target, pairs, {}, 0, progress, note, WhenRaised::kFinish);
    });
  });
}

std::unique_ptr<Scope> locked(py::object value, const py::tuple& gone, Process& process,
                              std::uint32_t timeout_ms) {
  return std::make_unique<Scope>(std::move(value), gone,
                                 [timeout_ms, &process](Scope::Steps& steps) {
                                   process.lock(timeout_ms);
                                   steps.emplace_back([&process] { process.bring_to_running(); });
                                 });
}

// Where the root has ended inside, the others are no longer found below it: `member_pids` tells
// their numbers from what Group::members() says.
std::unique_ptr<Scope> locked_group(py::object value, const py::tuple& gone, Session& session,
                                    Group& group, int pid, std::uint32_t timeout_ms,
                                    const py::object& member_pids) {
  return std::make_unique<Scope>(
      std::move(value), gone,
      [pid, timeout_ms, member_pids, &session, &group](Scope::Steps& steps) {
        group.lock(timeout_ms);
        steps.emplace_back(
            [pid, &session] { (void)session.recover(pid, py::none(), WhenRaised::kFinish); });
        for (const int member : py::cast<std::vector<int>>(member_pids(group.members()))) {
          std::shared_ptr<Process> process = session.process(member);
          steps.emplace_back([process] { process->bring_to_running(); });
        }
      });
}

// (number, name, exit status, meaning) of every code but "no error".
std::vector<std::tuple<int, std::string, int, std::string>> codes() {
  std::vector<std::tuple<int, std::string, int, std::string>> out;
  for (int number = 1;; ++number) {
    const auto code = static_cast<stasis_code>(number);
    const char* name = stasis_code_name(code);
    if (name == nullptr) return out;
    out.emplace_back(number, name, stasis_code_exit_status(code), stasis_code_meaning(code));
  }
}

}  // namespace

PYBIND11_MODULE(_stasis, module) {
  module.doc() = "libstasis by its C interface; use the package stasis instead";
  module.def("version", [] { return std::string(stasis_version()); });
  module.def("codes", &codes);
  module.def("set_error_factory", [](py::object factory) { error_factory() = std::move(factory); });

  py::class_<Process>(module, "Process")
      .def("state", &Process::state)
      .def("restore_thread_id", &Process::restore_thread_id)
      .def("lock", &Process::lock)
      .def("checkpoint", &Process::checkpoint)
      .def("restore", &Process::restore)
      .def("unlock", &Process::unlock)
      .def("bring_to_running", &Process::bring_to_running);
  py::class_<Group>(module, "Group")
      .def("members", &Group::members)
      .def("lock", &Group::lock)
      .def("checkpoint", &Group::checkpoint)
      .def("restore", &Group::restore)
      .def("unlock", &Group::unlock);
  py::class_<Session>(module, "Session")
      .def(py::init<const std::optional<std::string>&, std::uint32_t, std::uint32_t>())
      .def("driver_version", &Session::driver_version)
      .def("cuda_version", &Session::cuda_version)
      .def("simulated", &Session::simulated)
      .def("process", &Session::process)
      .def("group", &Session::group)
      .def("suspend", &Session::suspend)
      .def("resume",
           [](Session& session, const Target& target, const Pairs& pairs,
              const std::optional<std::string>& images_dir, std::uint32_t time_limit_ms,
              const py::object& progress, const py::object& note) {
             return session.resume(target, pairs, images_dir, time_limit_ms, progress, note);
           })
      .def("swap", &Session::swap)
      .def("dump", &Session::dump)
      .def("restore", &Session::restore)
      .def("recover", [](Session& session, const Target& target, const py::object& note) {
        return session.recover(target, note);
      });
  py::class_<Scope>(module, "Scope")
      .def("__enter__", &Scope::enter)
      .def("__exit__", [](Scope& scope, const py::args&) { scope.leave(); });
  // What a scope uses lives as long as it does.
  module.def("suspended", &suspended, py::keep_alive<0, 3>());
  module.def("locked", &locked, py::keep_alive<0, 3>());
  module.def("locked_group", &locked_group, py::keep_alive<0, 3>(), py::keep_alive<0, 4>());
  module.def("inspect", &Session::inspect);
}
