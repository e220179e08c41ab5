#include "delegate/wire/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace adaptra::delegate {
namespace {

constexpr std::size_t kHugePage = 2U << 20;

std::size_t round_up(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (std::max<std::size_t>(bytes, 1) + page - 1) / page * page;
}

}  // namespace

Pages::Pages(std::uint64_t id, std::size_t bytes) : mapped_(round_up(bytes)) {
  void* const at = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  // Fewer page faults and shorter registrations; no more than a hint.
  if (mapped_ >= kHugePage) madvise(at, mapped_, MADV_HUGEPAGE);
  memory_ = Memory{id, std::span(static_cast<std::byte*>(at), bytes)};
}

Pages::~Pages() { munmap(memory_.bytes.data(), mapped_); }

}  // namespace adaptra::delegate
