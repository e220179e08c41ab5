// One message under way, as the thread that posted it sees it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "delegate/wire/memory.h"

namespace adaptra::delegate {

enum class Outcome {
  kPending,
  kDone,    // sent and acknowledged, or arrived
  kOther,   // the next message is of another size than the receive expects; text() is its head
  kFailed,  // will never be exchanged; text() says why
};

// Completed once, by the engine; waited for by any thread.
class Request {
 public:
  // `message` is the memory of a message to send, kept until it is done; nothing for a receive.
  explicit Request(std::shared_ptr<const Pages> message = nullptr) : pages_(std::move(message)) {}

  // Waits until the outcome is known or `timeout` is over.
  Outcome wait(std::optional<std::chrono::duration<double>> timeout) {
    std::unique_lock lock(mutex_);
    const auto known = [this] { return outcome_ != Outcome::kPending; };
    if (!timeout) {
      changed_.wait(lock, known);
    } else {
      changed_.wait_until(lock, Clock::now() + std::chrono::duration_cast<Clock::duration>(*timeout), known);
    }
    return outcome_;
  }

  [[nodiscard]] Outcome outcome() const {
    const std::lock_guard lock(mutex_);
    return outcome_;
  }

  // The slot and the bytes of an arrived message; valid until it is released. False if nobody waits for it any more.
  [[nodiscard]] bool arrive(std::shared_ptr<const Pages> slot, std::uint32_t index, Clock::time_point at) {
    return finish(Outcome::kDone, [&] {
      pages_ = std::move(slot);
      slot_ = index;
      moment_ = at;
    });
  }

  void sent(Clock::time_point at) {
    finish(Outcome::kDone, [&] {
      pages_.reset();
      moment_ = at;
    });
  }

  void arrive_other(std::string head) {
    finish(Outcome::kOther, [&] { text_ = std::move(head); });
  }

  void fail(std::string why) {
    finish(Outcome::kFailed, [&] { text_ = std::move(why); });
  }

  // Valid once the outcome is known.
  [[nodiscard]] const std::shared_ptr<const Pages>& pages() const { return pages_; }
  [[nodiscard]] std::uint32_t slot() const { return slot_; }
  [[nodiscard]] Clock::time_point moment() const { return moment_; }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  template <typename Change>
  bool finish(Outcome outcome, Change change) {
    {
      const std::lock_guard lock(mutex_);
      if (outcome_ != Outcome::kPending) return false;
      change();
      outcome_ = outcome;
    }
    changed_.notify_all();
    return true;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Outcome outcome_ = Outcome::kPending;
  std::shared_ptr<const Pages> pages_;
  std::uint32_t slot_ = 0;
  Clock::time_point moment_;
  std::string text_;
};

}  // namespace adaptra::delegate
