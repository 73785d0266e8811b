// Operators: a few of the device's own, and for all others the CPU's, on copies. Tensors of two devices are refused, as
// every real device refuses them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_as_complex_cpu_dispatch.h>
#include <ATen/ops/view_as_real_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <optional>
#include <set>
#include <string>
#include "device.h"

namespace fake {

// Whether this thread is in a kernel: the copies in which the fallback moves tensors take no time of their own.
inline int& depth() {
  thread_local int depth = 0;
  return depth;
}
struct Inside {
  Inside() { depth()++; }
  ~Inside() { depth()--; }
};

inline bool here(const at::Tensor& tensor) { return tensor.device().type() == kFake; }

// The same memory as a tensor of the CPU.
inline at::Tensor on_host(const at::Tensor& tensor) {
  if (!here(tensor)) return tensor;
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [keep = tensor](void*) {},
                             tensor.options().device(at::kCPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

inline at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>,
                        std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kFake)));
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kFake)));
  return at::detail::empty_strided_generic(size, stride, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A copy takes time on the current stream. The host waits for it, unless it was asked not to and the memory is pinned.
inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto to = on_host(self), from = on_host(source);
  if (depth()) {
    to.copy_(from);
    return self;
  }
  auto stream = current_stream(here(self) ? self.device().index() : source.device().index());
  auto bytes = here(self) && here(source) ? 0 : source.nbytes();
  auto within = here(self) && here(source);
  auto free = within || (non_blocking && (here(self) ? source : self).is_pinned());
  if (free && !here(self)) {
    Clock::get().copy(stream, bytes, [to, kept = from.clone()]() mutable {
      at::NoGradGuard guard;
      to.copy_(kept);
    });
    return self;
  }
  to.copy_(from);
  auto done = Clock::get().copy(stream, bytes);
  if (!free) Clock::get().reach(done);
  return self;
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  copy_(target, self, non_blocking);
  return to;
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                                 std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  int64_t count = 1;
  for (auto length : sizes) count *= length;
  size_t bytes = (count + impl->storage_offset()) * self.element_size();
  if (bytes > impl->storage().nbytes()) hooks().resizePrivateUse1Bytes(impl->storage(), bytes);
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// `.item()`: the host reads a number, and waits until the stream has made it.
inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (!depth()) Clock::get().reach(Clock::get().done(current_stream(self.device().index())));
  return on_host(self).item();
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                               c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() || !sizes.size())
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  else
    impl->set_sizes_contiguous(sizes);
  return self;
}

inline at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, source, 0, {c10::SymInt(count)}, {});
}

// The devices of an operator's tensors. Numbers that are tensors of the CPU go with any device, and so do indices.
class Devices {
 public:
  void look(const at::Tensor& tensor, bool index) {
    if (!tensor.defined()) return;
    if (here(tensor)) {
      first_ = first_.value_or(tensor.device());
      if (*first_ != tensor.device()) other_ = tensor.device();
    } else if (tensor.dim() > 0 && !index) {
      other_ = tensor.device();
    }
  }
  void check(const std::string& name) const {
    TORCH_CHECK(!first_ || !other_, "Expected all tensors to be on the same device, but found at least two devices, ",
                *first_, " and ", *other_, "! (in ", name, ")");
  }
  c10::DeviceIndex index() const { return first_ ? first_->index() : current_device(); }

 private:
  std::optional<c10::Device> first_, other_;
};

inline Devices devices_of(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::string& name) {
  static const std::set<std::string> indexing{"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                              "aten::index_put", "aten::_unsafe_index"};
  Devices found;
  bool may_index = indexing.count(name), first = true;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    bool index = may_index && !first;
    if (value.isTensor()) found.look(value.toTensor(), index);
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) found.look(tensor, index);
    if (value.isOptionalTensorList())
      for (const auto& tensor : value.toOptionalTensorList()) {
        std::optional<at::Tensor> given = tensor;
        if (given) found.look(*given, index);
      }
    first = false;
  }
  return found;
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name().name;
  auto devices = devices_of(op, stack, name);
  devices.check(name);
  Inside inside;
  std::optional<Drawing> drawing;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(devices.index());
  c10::DeviceGuard guard(c10::Device(kFake, devices.index()));
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  Clock::get().launch(current_stream(devices.index()), name);
}

// Its running statistics change in place, of which its schema says nothing: the fallback would change copies of them.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto host = [&](const std::optional<at::Tensor>& given) -> std::optional<at::Tensor> {
    if (!given || !given->defined()) return std::nullopt;
    TORCH_CHECK(given->device() == input.device(), "Expected all tensors to be on the same device");
    return on_host(*given);
  };
  Inside inside;
  auto made = at::native_batch_norm(on_host(input), host(weight), host(bias), host(mean), host(variance), training,
                                    momentum, eps);
  Clock::get().launch(current_stream(input.device().index()), "aten::native_batch_norm");
  auto device = input.device();
  return {std::get<0>(made).to(device), std::get<1>(made).to(device), std::get<2>(made).to(device)};
}

}  // namespace fake
