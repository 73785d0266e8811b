// What torch asks of a device: which one is current, its streams, its events, its random numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <map>
#include <mutex>
#include "clock.h"
#include "memory.h"

namespace fake {

// How many devices this host has: FAKE_DEVICES, or one.
inline c10::DeviceIndex device_count() {
  static const auto count = [] {
    const char* given = std::getenv("FAKE_DEVICES");
    return static_cast<c10::DeviceIndex>(given ? std::atoi(given) : 1);
  }();
  return count;
}

inline c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  TORCH_CHECK(index < device_count(), "fake:", static_cast<int>(index), " does not exist: this host has ",
              static_cast<int>(device_count()));
  auto before = current_device();
  if (index >= 0) current_device() = index;
  return before;
}

// The stream to which this thread gives its work, of each device.
inline c10::StreamId& current_stream_id(c10::DeviceIndex device) {
  thread_local std::map<c10::DeviceIndex, c10::StreamId> ids;
  return ids[device];
}

inline c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device), current_stream_id(device));
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kFake;
  c10::DeviceType type() const override { return kFake; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Device getDevice() const override { return {kFake, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override { return {kFake, exchange_device(device.index())}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device() = device.index();
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kFake, index_of(device)));
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, index_of(device)), Clock::get().new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_stream_id(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Clock::get().done(stream) <= Clock::get().host();
  }
  void synchronizeStream(const c10::Stream& stream) const override { Clock::get().reach(Clock::get().done(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Clock::get().reach(Clock::get().all_done(device < 0 ? current_device() : device));
  }

  // An event is the moment at which its stream gets to it.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Seconds(0.0);
    *static_cast<Seconds*>(*event) = Clock::get().done(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Clock::get().hold(stream, *static_cast<Seconds*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || *static_cast<Seconds*>(event) <= Clock::get().host();
  }
  void synchronizeEvent(void* event) const override {
    if (event) Clock::get().reach(*static_cast<Seconds*>(event));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return 1e3 * (*static_cast<Seconds*>(end) - *static_cast<Seconds*>(start));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Seconds*>(event);
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};

// The random numbers of each device: states of a generator of the CPU's kind, since CPU kernels draw from it.
class Randomness {
 public:
  static Randomness& get() {
    static auto* randomness = new Randomness();
    return *randomness;
  }
  at::Tensor& state(c10::DeviceIndex device) {
    auto& state = states_[device];
    if (!state.defined()) state = at::detail::createCPUGenerator().get_state();
    return state;
  }
  void seed(uint64_t seed) {
    for (c10::DeviceIndex device = 0; device < device_count(); device++)
      states_[device] = at::detail::createCPUGenerator(seed).get_state();
  }
  std::mutex mutex;

 private:
  std::map<c10::DeviceIndex, at::Tensor> states_;
};

// While it lives, kernels of the CPU that ask for random numbers get the device's.
class Drawing {
 public:
  explicit Drawing(c10::DeviceIndex device)
      : lock_(Randomness::get().mutex), cpu_(at::detail::getDefaultCPUGenerator()), before_(cpu_.get_state()),
        device_(device) {
    cpu_.set_state(Randomness::get().state(device));
  }
  ~Drawing() {
    Randomness::get().state(device_) = cpu_.get_state();
    cpu_.set_state(before_);
  }

 private:
  std::lock_guard<std::mutex> lock_;
  at::Generator cpu_;
  at::Tensor before_;
  c10::DeviceIndex device_;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  // Nobody draws from it: kernels run under `Drawing`.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = device_memory().allocate(bytes);
    if (auto kept = std::min(storage.nbytes(), bytes)) std::memcpy(fresh.get(), storage.data(), kept);
    const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(fresh));
    const_cast<c10::Storage&>(storage).set_nbytes(bytes);
  }
};

inline Hooks& hooks() {
  static auto* hooks = new Hooks();
  return *hooks;
}

}  // namespace fake
