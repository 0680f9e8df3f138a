// Streams, events, host functions.
#include "sim/api.h"
#include "sim/driver.h"
#include "sim/objects.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

Event* find_event(Driver& driver, CUevent handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  std::lock_guard lock(driver.mutex);
  return driver.events.contains(event) ? event : nullptr;
}

std::shared_ptr<Event::Recording> recording_of(Event& event) {
  std::lock_guard lock(event.mutex);
  return event.recording;
}

// A function on a stream of the current context.
template <class F>
CUresult with_stream(Driver& driver, Context& context, CUstream handle, F&& body) {
  auto* stream = find_stream(driver, context, handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  // A stream works in its own context, whatever is current.
  return body(driver, *stream->context, *stream);
}

template <class F>
CUresult on_stream(CUstream handle, F&& body) {
  return in_context(
      [&](Driver& driver, Context& context) { return with_stream(driver, context, handle, body); });
}

// The same without waiting for the lock.
template <class F>
CUresult ask_stream(CUstream handle, F&& body) {
  return in_context_passing(
      [&](Driver& driver, Context& context) { return with_stream(driver, context, handle, body); });
}

CUresult create_stream(CUstream* out, unsigned flags, int priority) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!out || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    auto* stream = new Stream;
    stream->context = &context;
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    stream->lane = std::make_shared<Lane>(driver.outstanding);
    {
      std::lock_guard lock(context.mutex);
      context.streams.insert(stream);
    }
    std::lock_guard lock(driver.mutex);
    driver.streams.insert(stream);
    *out = reinterpret_cast<CUstream>(stream);
    return CUDA_SUCCESS;
  });
}

CUresult record(CUevent handle, CUstream stream_handle, unsigned flags) {
  return on_stream(
      stream_handle, [&](Driver& driver, Context& context, Stream& stream) -> CUresult {
        if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
        auto* event = find_event(driver, handle);
        if (!event || event->context != &context) return CUDA_ERROR_INVALID_HANDLE;
        auto recording = std::make_shared<Event::Recording>();
        const auto mark = context.submit(stream, [recording] { recording->time_ns = now_ns(); });
        std::lock_guard lock(event->mutex);
        recording->mark = mark;
        event->recording = recording;
        return CUDA_SUCCESS;
      });
}

}  // namespace

namespace stasis::sim {

void destroy_streams(Driver& driver, Context& context) {
  std::set<Stream*> streams;
  {
    std::lock_guard lock(context.mutex);
    streams.swap(context.streams);
  }
  std::lock_guard lock(driver.mutex);
  for (auto* stream : streams) {
    driver.streams.erase(stream);
    stream->lane->finish();
    delete stream;
  }
  context.default_stream.lane->finish();
}

}  // namespace stasis::sim

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  return create_stream(stream, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  return create_stream(stream, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  return gated([&](Driver& driver) -> CUresult {
    auto* stream = reinterpret_cast<Stream*>(handle);
    {
      std::lock_guard lock(driver.mutex);
      if (!driver.streams.erase(stream)) return CUDA_ERROR_INVALID_HANDLE;
    }
    {
      std::lock_guard lock(stream->context->mutex);
      stream->context->streams.erase(stream);
      auto& ends = stream->context->of_destroyed;
      std::erase_if(ends, [](const Mark& mark) { return mark.reached(); });
      ends.push_back(Lane::last(stream->lane));
    }
    stream->lane->finish();
    delete stream;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamQuery(CUstream handle) {
  return ask_stream(handle, [](Driver& driver, Context& context, Stream& stream) -> CUresult {
    driver.memory.touch_device();
    return context.idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return ask_stream(handle, [](Driver& driver, Context& context, Stream& stream) -> CUresult {
    driver.memory.touch_device();
    for (const auto& mark : context.last(stream))
      mark.wait();
    trim_pools(driver);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
  return ask_stream(handle, [&](Driver& driver, Context& context, Stream& stream) -> CUresult {
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    auto* event = find_event(driver, event_handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    const auto recording = recording_of(*event);
    if (!recording) return CUDA_SUCCESS;
    std::lock_guard lock(context.mutex);
    if (!recording->mark.reached()) stream.pending.push_back(recording->mark);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  return ask_stream(handle, [&](Driver&, Context&, Stream& stream) -> CUresult {
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = stream.flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  return ask_stream(handle, [&](Driver&, Context&, Stream& stream) -> CUresult {
    if (!priority) return CUDA_ERROR_INVALID_VALUE;
    *priority = stream.priority;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
  return ask_stream(handle, [&](Driver&, Context& context, Stream&) -> CUresult {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = reinterpret_cast<CUcontext>(&context);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  return ask_stream(handle, [&](Driver&, Context&, Stream& stream) -> CUresult {
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    *id = stream.id;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void* user_data,
                             unsigned int flags) {
  return on_stream(handle, [&](Driver&, Context& context, Stream& stream) -> CUresult {
    if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
    context.submit(stream, [=] { callback(handle, CUDA_SUCCESS, user_data); });
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* user_data) {
  return on_stream(handle, [&](Driver&, Context& context, Stream& stream) -> CUresult {
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    context.submit(stream, [=] { function(user_data); });
    return CUDA_SUCCESS;
  });
}

CUresult cuEventCreate(CUevent* out, unsigned int flags) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!out || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    auto* event = new Event;
    event->context = &context;
    event->flags = flags;
    std::lock_guard lock(driver.mutex);
    driver.events.insert(event);
    context.events.insert(event);
    *out = reinterpret_cast<CUevent>(event);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventDestroy_v2(CUevent handle) {
  return gated([&](Driver& driver) -> CUresult {
    auto* event = reinterpret_cast<Event*>(handle);
    std::lock_guard lock(driver.mutex);
    if (!driver.events.erase(event)) return CUDA_ERROR_INVALID_HANDLE;
    event->context->events.erase(event);
    delete event;
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return record(event, stream, 0); }

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
  return record(event, stream, flags);
}

CUresult cuEventQuery(CUevent handle) {
  return passing([&](Driver& driver) -> CUresult {
    auto* event = find_event(driver, handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    driver.memory.touch_device();
    const auto recording = recording_of(*event);
    return !recording || recording->mark.reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return passing([&](Driver& driver) -> CUresult {
    auto* event = find_event(driver, handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    driver.memory.touch_device();
    if (const auto recording = recording_of(*event)) recording->mark.wait();
    trim_pools(driver);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return gated([&](Driver& driver) -> CUresult {
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    auto* first = find_event(driver, start);
    auto* second = find_event(driver, end);
    if (!first || !second || ((first->flags | second->flags) & CU_EVENT_DISABLE_TIMING)) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    const auto from = recording_of(*first);
    const auto to = recording_of(*second);
    if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
    if (!from->mark.reached() || !to->mark.reached()) return CUDA_ERROR_NOT_READY;
    *milliseconds = static_cast<float>(static_cast<double>(to->time_ns - from->time_ns) / 1e6);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime(milliseconds, start, end);
}
