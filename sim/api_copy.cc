// Copies and memsets. Ranges are checked when the work is submitted and moved on the stream's
// thread.
#include <algorithm>
#include <cstring>
#include <memory>

#include "sim/api.h"
#include "sim/driver.h"
#include "sim/graph.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

enum class Side { kDevice, kHost, kUnified };  // what a parameter promises to be

struct Range {
  Address at = 0;
  Side side = Side::kUnified;
};

template <class T>
T* pointer(Address at) {
  return reinterpret_cast<T*>(at);
}

Range device(CUdeviceptr at) { return {at, Side::kDevice}; }
Range host(const void* at) { return {reinterpret_cast<Address>(at), Side::kHost}; }
Range unified(CUdeviceptr at) { return {at, Side::kUnified}; }

// Host memory that the program did not allocate or register through CUDA.
bool is_pageable(Driver& driver, const Range& range, std::size_t bytes) {
  return range.side == Side::kHost && !driver.memory.accessible(range.at, bytes);
}

bool legal(Driver& driver, const Range& range, std::size_t bytes) {
  return range.side == Side::kHost ? range.at != 0 : driver.memory.accessible(range.at, bytes);
}

// A copy from or to the host that is captured holds what it names. Is it one that is captured?
bool note_captured(Driver& driver, const Stream& stream, const Range& to, const Range& from) {
  std::lock_guard lock(stream.context->mutex);
  if (!stream.capture) return false;
  if (to.side == Side::kHost) stream.capture->note_operand(driver.memory, from.at);
  if (from.side == Side::kHost) stream.capture->note_operand(driver.memory, to.at);
  return true;
}

// The stream's order, and for functions without "Async" the caller's too.
CUresult run(Context& context, Stream& stream, bool wait, std::function<void()> work) {
  const auto mark = context.submit(stream, std::move(work));
  if (wait) mark.wait();
  return CUDA_SUCCESS;
}

CUresult copy(Range to, Range from, std::size_t bytes, bool async, CUstream handle) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    if (!legal(driver, to, bytes) || !legal(driver, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
    // As the real driver: a pageable source is staged, so that the program may change it at once; a
    // pageable destination is complete when the call returns.
    // An error or a death comes with the call; a delay or a hang is the transfer's own.
    Plan plan = driver.next_plan(FaultAction::kTransfer, context.device);
    const Plan in_stream{.hang = plan.hang, .delay_ns = plan.delay_ns};
    plan.hang = false;
    plan.delay_ns = 0;
    if (auto rc = suffer(plan); rc != CUDA_SUCCESS) return rc;
    const bool captured = note_captured(driver, *stream, to, from);
    const bool wait = !async || is_pageable(driver, to, bytes);
    if (!wait && !captured && is_pageable(driver, from, bytes)) {
      std::shared_ptr<char[]> staged(new char[bytes]);
      std::memcpy(staged.get(), pointer<char>(from.at), bytes);
      return run(context, *stream, false, [=] {
        (void)suffer(in_stream);
        std::memcpy(pointer<char>(to.at), staged.get(), bytes);
      });
    }
    return run(context, *stream, wait, [=] {
      (void)suffer(in_stream);
      std::memmove(pointer<char>(to.at), pointer<char>(from.at), bytes);
    });
  });
}

struct Plane {
  Range start;
  std::size_t pitch = 0;
};

// One side of a two-dimensional copy; false: not a side that we know.
bool plane(CUmemorytype type, const void* host_pointer, CUdeviceptr device_pointer,
           std::size_t pitch, std::size_t x, std::size_t y, std::size_t width, Plane& out) {
  switch (type) {
    case CU_MEMORYTYPE_HOST:
      out.start = host(host_pointer);
      break;
    case CU_MEMORYTYPE_DEVICE:
      out.start = device(device_pointer);
      break;
    case CU_MEMORYTYPE_UNIFIED:
      out.start = unified(device_pointer);
      break;
    default:
      return false;
  }
  out.pitch = pitch ? pitch : x + width;
  out.start.at += y * out.pitch + x;
  return out.pitch >= x + width;
}

CUresult copy_2d(const CUDA_MEMCPY2D* c, bool async, CUstream handle) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!c) return CUDA_ERROR_INVALID_VALUE;
    auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    const auto width = c->WidthInBytes;
    const auto height = c->Height;
    if (width == 0 || height == 0) return CUDA_SUCCESS;
    Plane to;
    Plane from;
    if (!plane(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcPitch, c->srcXInBytes, c->srcY,
               width, from) ||
        !plane(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstPitch, c->dstXInBytes, c->dstY,
               width, to)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!legal(driver, to.start, (height - 1) * to.pitch + width) ||
        !legal(driver, from.start, (height - 1) * from.pitch + width)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const bool wait =
        !async || is_pageable(driver, to.start, width) || is_pageable(driver, from.start, width);
    return run(context, *stream, wait, [=] {
      for (std::size_t row = 0; row < height; ++row) {
        std::memmove(pointer<char>(to.start.at + row * to.pitch),
                     pointer<char>(from.start.at + row * from.pitch), width);
      }
    });
  });
}

template <class T>
CUresult fill(CUdeviceptr to, T value, std::size_t count, bool async, CUstream handle) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (count == 0) return CUDA_SUCCESS;
    if (to % sizeof(T) || count > SIZE_MAX / sizeof(T) ||
        !driver.memory.accessible(to, count * sizeof(T))) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return run(context, *stream, !async, [=] { std::fill_n(pointer<T>(to), count, value); });
  });
}

}  // namespace

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes) {
  return copy(unified(dst), unified(src), bytes, false, nullptr);
}
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
  return copy(unified(dst), unified(src), bytes, true, stream);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, std::size_t bytes) {
  return copy(device(dst), host(src), bytes, false, nullptr);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, std::size_t bytes,
                              CUstream stream) {
  return copy(device(dst), host(src), bytes, true, stream);
}
CUresult cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, std::size_t bytes) {
  return copy(host(dst), device(src), bytes, false, nullptr);
}
CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
  return copy(host(dst), device(src), bytes, true, stream);
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes) {
  return copy(device(dst), device(src), bytes, false, nullptr);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes,
                              CUstream stream) {
  return copy(device(dst), device(src), bytes, true, stream);
}
CUresult cuMemcpyPeer(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext, std::size_t bytes) {
  return copy(device(dst), device(src), bytes, false, nullptr);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext,
                           std::size_t bytes, CUstream stream) {
  return copy(device(dst), device(src), bytes, true, stream);
}
CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* c) { return copy_2d(c, false, nullptr); }
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* c) { return copy_2d(c, false, nullptr); }
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* c, CUstream stream) {
  return copy_2d(c, true, stream);
}

CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, std::size_t count) {
  return fill(dst, value, count, false, nullptr);
}
CUresult cuMemsetD16_v2(CUdeviceptr dst, unsigned short value, std::size_t count) {
  return fill(dst, value, count, false, nullptr);
}
CUresult cuMemsetD32_v2(CUdeviceptr dst, unsigned int value, std::size_t count) {
  return fill(dst, value, count, false, nullptr);
}
CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, std::size_t count, CUstream stream) {
  return fill(dst, value, count, true, stream);
}
CUresult cuMemsetD16Async(CUdeviceptr dst, unsigned short value, std::size_t count,
                          CUstream stream) {
  return fill(dst, value, count, true, stream);
}
CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int value, std::size_t count, CUstream stream) {
  return fill(dst, value, count, true, stream);
}
