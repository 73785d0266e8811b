// Simulated time: a host, and devices with streams that run behind it.
//
// Nothing here takes real time. A kernel is computed at once, when it is launched; what passes is a number. So a test
// says what kernels and copies cost, and reads off when each stream is done, by events or by the host's own clock:
//
//   host:    ----launch A--launch B--(runs ahead)--synchronize...............|----   waits for the stream
//   stream:       [      A       ][        B         ][ copy to the host ]--------
//
// A stream begins a kernel when it is done with the one before, but not before the host has launched it. The host
// waits only where it must: at a synchronize, at `.item()`, at a copy from or to memory that is not pinned.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

using Seconds = double;

class Clock {
 public:
  // The one clock of this process. Never destroyed: the autograd engine's threads outlive static objects.
  static Clock& get() {
    static auto* clock = new Clock();
    return *clock;
  }

  // What a kernel takes: "" for all that have no cost of their own, else an operator such as "aten::mm". Also
  // "copy", per byte between host and device, and "launch", of the host's own time for each kernel.
  void set_cost(const std::string& what, Seconds seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    costs_[what] = seconds;
  }

  Seconds host() {
    std::lock_guard<std::mutex> lock(mutex_);
    return host_time();
  }

  int64_t kernels() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kernels_;
  }

  // The host works on something of its own.
  void work(Seconds seconds) { reach(host() + seconds); }

  // Gives a stream a kernel.
  void launch(const c10::Stream& stream, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_++;
    host_time() += cost("launch", 0.0);
    enqueue(stream, cost(name, cost("", 0.0)));
  }

  // Gives a stream work of so many seconds.
  void occupy(const c10::Stream& stream, Seconds seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    enqueue(stream, seconds);
  }

  // Gives a stream a copy; returns when it is done. `arrive`, if given, writes the bytes then, and not before: who reads
  // the destination without waiting for the copy reads what was there.
  Seconds copy(const c10::Stream& stream, size_t bytes, std::function<void()> arrive = nullptr) {
    Seconds done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done = enqueue(stream, bytes * cost("copy", 0.0));
      if (arrive) arrivals_.emplace(done, std::move(arrive));
    }
    reach(0.0);  // it may have arrived already
    return done;
  }

  // When a stream will be done with all that it has been given.
  Seconds done(const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return enqueue(stream, 0.0);
  }

  Seconds all_done(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    Seconds latest = host_time();
    for (const auto& [key, at] : streams_)
      if (key.first == device) latest = std::max(latest, at);
    return latest;
  }

  // Lets a stream wait for a moment.
  void hold(const c10::Stream& stream, Seconds until) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& at = streams_[{stream.device_index(), stream.id()}];
    at = std::max(at, until);
  }

  // Lets the host wait for a moment; then all that was copied to it by then is there.
  void reach(Seconds until) {
    std::vector<std::function<void()>> arrived;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      host_time() = std::max(host_time(), until);
      while (!arrivals_.empty() && arrivals_.begin()->first <= host_time()) {
        arrived.push_back(std::move(arrivals_.begin()->second));
        arrivals_.erase(arrivals_.begin());
      }
    }
    for (auto& arrive : arrived) arrive();
  }

  c10::StreamId new_stream() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++latest_stream_;
  }

 private:
  // Each thread of the host has a time of its own: one that waits for the device does not hold up the others.
  static Seconds& host_time() {
    thread_local Seconds time = 0.0;
    return time;
  }

  Seconds cost(const std::string& what, Seconds otherwise) const {
    auto found = costs_.find(what);
    return found == costs_.end() ? otherwise : found->second;
  }

  Seconds enqueue(const c10::Stream& stream, Seconds seconds) {
    auto& at = streams_[{stream.device_index(), stream.id()}];
    at = std::max(at, host_time()) + seconds;
    return at;
  }

  std::mutex mutex_;
  int64_t kernels_ = 0;
  c10::StreamId latest_stream_ = 0;  // 0 is the default one
  std::map<std::string, Seconds> costs_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Seconds> streams_;  // when each one is done
  std::multimap<Seconds, std::function<void()>> arrivals_;                 // copies to the host that are under way
};

}  // namespace fake
