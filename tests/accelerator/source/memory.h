// The memory of the device, and memory of the host that is pinned for it. Both are host memory; torch knows by the
// device of a tensor that operators of the CPU must not touch the first.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace fake {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr size_t kAlign = 64;

// The device on which this thread makes tensors.
inline c10::DeviceIndex& current_device() {
  thread_local c10::DeviceIndex index = 0;
  return index;
}

inline void* aligned(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, kAlign, bytes) == 0, "the host has no memory left");
  return memory;
}

// What the device's memory holds, in bytes. A test may limit it.
struct Usage {
  std::mutex mutex;
  size_t allocated = 0, peak = 0, limit = SIZE_MAX;
  static Usage& get() {
    static auto* usage = new Usage();
    return *usage;
  }
};

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kFake, current_device());
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto& usage = Usage::get();
    {
      std::lock_guard<std::mutex> lock(usage.mutex);
      TORCH_CHECK_WITH(OutOfMemoryError, usage.allocated + bytes <= usage.limit, "fake device out of memory: ", bytes,
                       " bytes beside ", usage.allocated, " of ", usage.limit);
      usage.allocated += bytes;
      usage.peak = std::max(usage.peak, usage.allocated);
    }
    // Its size stands before it, for when it is given back.
    auto* whole = static_cast<char*>(aligned(bytes + kAlign));
    std::memcpy(whole, &bytes, sizeof(bytes));
    return {whole + kAlign, whole + kAlign, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* memory) {
    if (!memory) return;
    auto* whole = static_cast<char*>(memory) - kAlign;
    size_t bytes = 0;
    std::memcpy(&bytes, whole, sizeof(bytes));
    auto& usage = Usage::get();
    {
      std::lock_guard<std::mutex> lock(usage.mutex);
      usage.allocated -= bytes;
    }
    std::free(whole);
  }
};

// Host memory of which the device knows: copies to and from it need not hold the host up.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = static_cast<char*>(aligned(std::max(bytes, kAlign)));
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[memory] = bytes;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  static bool holds(const void* pointer) {
    auto* memory = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> lock(mutex());
    auto after = blocks().upper_bound(const_cast<char*>(memory));
    if (after == blocks().begin()) return false;
    auto block = std::prev(after);
    return memory < block->first + std::max<size_t>(block->second, 1);
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex();
    return *mutex;
  }
  static std::map<char*, size_t>& blocks() {
    static auto* blocks = new std::map<char*, size_t>();
    return *blocks;
  }
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(static_cast<char*>(memory));
    }
    std::free(memory);
  }
};

inline DeviceAllocator& device_memory() {
  static auto* allocator = new DeviceAllocator();
  return *allocator;
}
inline PinnedAllocator& pinned_memory() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

}  // namespace fake
