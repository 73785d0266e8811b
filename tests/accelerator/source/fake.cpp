// A device "fake" that lives in host memory: torch's PrivateUse1, with simulated time. Here all of it is registered.
//
// What it is for: a mixed job on a machine without an accelerator. It has what is hard about a device (tensors that the
// CPU may not touch and gloo refuses, random numbers of its own, streams that run behind the host, pinned memory) and
// nothing that is fast. It uses C++ interfaces of torch that change between versions; see `fake_build.py`.
#include <torch/library.h>
#include "clock.h"
#include "device.h"
#include "gloo.h"
#include "memory.h"
#include "operators.h"

namespace {

using namespace fake;

REGISTER_ALLOCATOR(kFake, &device_memory());
C10_REGISTER_GUARD_IMPL(PrivateUse1, fake::Guard);
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks()), true);

c10::Stream now() { return current_stream(current_device()); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::fallback>()); }

// Under autocast every operator runs as it is.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", fake::empty);
  m.impl("empty_strided", fake::empty_strided);
  m.impl("copy_", fake::copy_);
  m.impl("_copy_from", fake::copy_from);
  m.impl("_copy_from_and_resize", fake::copy_from_and_resize);
  m.impl("resize_", fake::resize_);
  m.impl("_local_scalar_dense", fake::local_scalar_dense);
  m.impl("native_batch_norm", fake::native_batch_norm);
  m.impl("set_.source_Storage", fake::set_source);
  m.impl("set_.source_Storage_storage_offset", fake::set_storage);
  // Torch would give these an output of the wrong shape, and warn.
  for (const char* name : {"mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fake::fallback>());
  // Views touch no memory.
  m.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  m.impl("view", TORCH_FN(at::cpu::view_symint));
  m.impl("_reshape_alias", TORCH_FN(at::cpu::_reshape_alias_symint));
  m.impl("unfold", TORCH_FN(at::cpu::unfold));
  m.impl("view_as_real", TORCH_FN(at::cpu::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::cpu::view_as_complex));
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  if (!fake::stages()) return;
  m.impl("allreduce_", fake::allreduce_);
  m.impl("broadcast_", fake::broadcast_);
  m.impl("allgather_", fake::allgather_);
}

// What `fake_device.py` gives to tests as `torch.fake`.
TORCH_LIBRARY(fakedev, m) {
  m.def("cost(str what, float seconds) -> ()", [](std::string what, double seconds) {
    Clock::get().set_cost(what, seconds);
  });
  m.def("now() -> float", [] { return Clock::get().host(); });
  m.def("work(float seconds) -> ()", [](double seconds) { Clock::get().work(seconds); });
  m.def("sleep(float seconds) -> ()", [](double seconds) { Clock::get().occupy(::now(), seconds); });
  m.def("kernels() -> int", [] { return Clock::get().kernels(); });
  m.def("synchronize(int device) -> ()", [](int64_t device) { Guard().synchronizeDevice(device); });
  m.def("device() -> int", [] { return static_cast<int64_t>(current_device()); });
  m.def("set_device(int device) -> ()", [](int64_t device) { exchange_device(device); });
  m.def("device_count() -> int", [] { return static_cast<int64_t>(device_count()); });
  m.def("seed(int seed) -> ()", [](int64_t seed) { Randomness::get().seed(seed); });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) { return Randomness::get().state(device).clone(); });
  m.def("set_rng_state(Tensor state, int device) -> ()", [](const at::Tensor& state, int64_t device) {
    Randomness::get().state(device) = state.clone();
  });
  m.def("memory(str what) -> int", [](std::string what) {
    auto& usage = Usage::get();
    std::lock_guard<std::mutex> lock(usage.mutex);
    if (what == "reset") usage.peak = usage.allocated;
    return static_cast<int64_t>(what == "peak" ? usage.peak : usage.allocated);
  });
  m.def("limit_memory(int bytes) -> ()", [](int64_t bytes) {
    auto& usage = Usage::get();
    std::lock_guard<std::mutex> lock(usage.mutex);
    usage.limit = bytes < 0 ? SIZE_MAX : bytes;
  });
}
