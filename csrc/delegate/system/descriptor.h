// A file descriptor that closes itself, and that forked children don't keep.
#pragma once

#include <unistd.h>

#include <utility>

#include "delegate/system/forks.h"

namespace adaptra::delegate {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {
    if (number_ >= 0) forks::hold(number_);
  }
  ~Descriptor() {
    // In a forked child the number is closed, or another descriptor's by now.
    if (const int number = release(); number >= 0 && generation_ == forks::generation()) close(number);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)), generation_(other.generation_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    std::swap(generation_, other.generation_);
    return *this;
  }

  [[nodiscard]] int get() const noexcept { return number_; }
  [[nodiscard]] int release() noexcept {
    if (number_ >= 0 && generation_ == forks::generation()) forks::forget(number_);
    return std::exchange(number_, -1);
  }

 private:
  int number_ = -1;
  unsigned generation_ = forks::generation();
};

}  // namespace adaptra::delegate
