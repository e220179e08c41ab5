// Page-aligned host memory, as devices register it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

// Owns pages. Pages that nobody writes to cost no memory.
class Pages {
 public:
  // Throws std::bad_alloc.
  Pages(std::uint64_t id, std::size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  [[nodiscard]] const Memory& memory() const noexcept { return memory_; }

 private:
  std::size_t mapped_;
  Memory memory_;
};

}  // namespace adaptra::delegate
