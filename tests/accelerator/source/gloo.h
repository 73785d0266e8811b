// Gloo and tensors of the device. By itself torch refuses them ("No backend type associated with device type fake"), as
// with every device of which gloo knows nothing. FAKE_GLOO=stage lets it copy them to the host and back, as gloo does with
// CUDA's.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <cstdlib>
#include <string>
#include "operators.h"

namespace fake {

inline bool stages() {
  const char* mode = std::getenv("FAKE_GLOO");
  return mode && std::string(mode) == "stage";
}

using Tensors = std::vector<at::Tensor>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

inline Tensors down(at::TensorList tensors) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.to(at::kCPU));
  return copies;
}

inline Work up(const Work& work, at::TensorList to, const Tensors& from) {
  work->wait();
  for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i]);
  return work;
}

template <class Options>
Options within(int64_t milliseconds) {
  Options options;
  options.timeout = std::chrono::milliseconds(milliseconds);
  return options;
}

inline std::tuple<Tensors, Work> allreduce_(at::TensorList tensors, const Group& group,
                                            const c10::intrusive_ptr<c10d::ReduceOp>& op,
                                            const std::optional<at::Tensor>&, bool, int64_t timeout) {
  auto copies = down(tensors);
  auto options = within<c10d::AllreduceOptions>(timeout);
  options.reduceOp = *op;
  return {tensors.vec(), up(group->getBackend(at::kCPU)->allreduce(copies, options), tensors, copies)};
}

inline std::tuple<Tensors, Work> broadcast_(at::TensorList tensors, const Group& group, int64_t root,
                                            int64_t root_tensor, bool, int64_t timeout) {
  auto copies = down(tensors);
  auto options = within<c10d::BroadcastOptions>(timeout);
  options.rootRank = root;
  options.rootTensor = root_tensor;
  return {tensors.vec(), up(group->getBackend(at::kCPU)->broadcast(copies, options), tensors, copies)};
}

inline std::tuple<std::vector<Tensors>, Work> allgather_(const std::vector<Tensors>& outputs, at::TensorList inputs,
                                                         const Group& group, bool, int64_t timeout) {
  auto copies = down(inputs);
  std::vector<Tensors> gathered;
  for (const auto& output : outputs) gathered.push_back(down(output));
  auto work = group->getBackend(at::kCPU)->allgather(gathered, copies, within<c10d::AllgatherOptions>(timeout));
  for (size_t i = 0; i < outputs.size(); i++) up(work, outputs[i], gathered[i]);
  return {outputs, work};
}

}  // namespace fake
