#include "sim/context.h"

#include "sim/graph.h"

namespace stasis::sim {
namespace {

constexpr int kDepth = 64;
struct Stack {
  Context* contexts[kDepth];
  int depth;
};
thread_local Stack stack{};

}  // namespace

Context* CurrentContext::get() { return stack.depth ? stack.contexts[stack.depth - 1] : nullptr; }

void CurrentContext::set(Context* context) {
  if (stack.depth) --stack.depth;
  if (context) stack.contexts[stack.depth++] = context;
}

bool CurrentContext::push(Context* context) {
  if (stack.depth == kDepth) return false;
  stack.contexts[stack.depth++] = context;
  return true;
}

bool CurrentContext::pop(Context*& context) {
  if (stack.depth == 0) return false;
  context = stack.contexts[--stack.depth];
  return true;
}

Mark Context::submit(Stream& stream, std::function<void()> work) {
  std::lock_guard lock(mutex);
  if (stream.capture) {
    stream.capture->nodes.push_back(std::move(work));
    return {stream.lane, 0};
  }
  std::vector<Mark> after = std::move(stream.pending);
  stream.pending.clear();
  if (stream.is_default) {
    for (auto* other : streams) {
      if (other->flags & cuda::CU_STREAM_NON_BLOCKING) continue;
      auto mark = Lane::last(other->lane);
      if (!mark.reached()) after.push_back(mark);
    }
  } else if (!(stream.flags & cuda::CU_STREAM_NON_BLOCKING)) {
    auto mark = Lane::last(default_stream.lane);
    if (!mark.reached()) after.push_back(mark);
  }
  return Lane::submit(stream.lane, std::move(work), std::move(after));
}

std::vector<Mark> Context::last(Stream& stream) {
  std::lock_guard lock(mutex);
  std::vector<Mark> marks = stream.pending;
  marks.push_back(Lane::last(stream.lane));
  return marks;
}

bool Context::idle(Stream& stream) {
  std::lock_guard lock(mutex);
  for (const auto& mark : stream.pending) {
    if (!mark.reached()) return false;
  }
  return Lane::last(stream.lane).reached();
}

std::vector<Mark> Context::last_of_all() {
  std::lock_guard lock(mutex);
  std::vector<Mark> marks{Lane::last(default_stream.lane)};
  for (auto* stream : streams) {
    marks.push_back(Lane::last(stream->lane));
    for (const auto& mark : stream->pending)
      marks.push_back(mark);
  }
  std::erase_if(of_destroyed, [](const Mark& mark) { return mark.reached(); });
  marks.insert(marks.end(), of_destroyed.begin(), of_destroyed.end());
  return marks;
}

void Context::synchronize() {
  for (const auto& mark : last_of_all())
    mark.wait();
}

}  // namespace stasis::sim
