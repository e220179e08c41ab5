#include "delegate/system/forks.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace adaptra::delegate::forks {
namespace {

std::atomic<unsigned> number{0};

// Never destroyed: descriptors may outlive the end of main().
struct Held {
  std::mutex mutex;
  std::vector<int> descriptors;
};

Held& held() {
  static Held* const made = [] {
    auto* const fresh = new Held;
    // Keeps other threads from changing the list while the process is copied.
    pthread_atfork([] { held().mutex.lock(); }, [] { held().mutex.unlock(); },
                   [] {
                     for (const int descriptor : held().descriptors) close(descriptor);
                     held().descriptors.clear();
                     ++number;
                     held().mutex.unlock();
                   });
    return fresh;
  }();
  return *made;
}

}  // namespace

void hold(int descriptor) {
  const std::lock_guard lock(held().mutex);
  held().descriptors.push_back(descriptor);
}

void forget(int descriptor) noexcept {
  const std::lock_guard lock(held().mutex);
  auto& descriptors = held().descriptors;
  const auto found = std::find(descriptors.begin(), descriptors.end(), descriptor);
  if (found == descriptors.end()) return;
  *found = descriptors.back();
  descriptors.pop_back();
}

unsigned generation() noexcept { return number.load(std::memory_order_relaxed); }

}  // namespace adaptra::delegate::forks
