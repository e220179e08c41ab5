// Sets of byte ranges: the bytes of a message that have arrived.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace adaptra::delegate {

// Disjoint stretches [begin, end), joined where they touch.
class Intervals {
 public:
  [[nodiscard]] bool covers(std::uint64_t begin, std::uint64_t end) const {
    const auto after = stretches_.upper_bound(begin);
    return after != stretches_.begin() && std::prev(after)->second >= end;
  }

  void add(std::uint64_t begin, std::uint64_t end) {
    auto at = stretches_.upper_bound(begin);
    if (at != stretches_.begin() && std::prev(at)->second >= begin) --at;
    while (at != stretches_.end() && at->first <= end) {
      begin = std::min(begin, at->first);
      end = std::max(end, at->second);
      at = stretches_.erase(at);
    }
    stretches_[begin] = end;
  }

  void remove(std::uint64_t begin, std::uint64_t end) {
    auto at = stretches_.upper_bound(begin);
    if (at != stretches_.begin()) --at;
    while (at != stretches_.end() && at->first < end) {
      const auto [first, last] = *at;
      if (last <= begin) {
        ++at;
        continue;
      }
      at = stretches_.erase(at);
      if (first < begin) stretches_[first] = begin;
      if (last > end) at = stretches_.emplace(end, last).first;
    }
  }

  // The end of the stretch in which `begin` lies; `begin` itself if it lies in none.
  [[nodiscard]] std::uint64_t end_of(std::uint64_t begin) const {
    const auto after = stretches_.upper_bound(begin);
    return after == stretches_.begin() ? begin : std::max(begin, std::prev(after)->second);
  }

  // The beginning of the next stretch behind `begin`, at most `end`.
  [[nodiscard]] std::uint64_t next_after(std::uint64_t begin, std::uint64_t end) const {
    const auto after = stretches_.upper_bound(begin);
    return after == stretches_.end() ? end : std::min(end, after->first);
  }

  // The end of each stretch, by its beginning.
  [[nodiscard]] const std::map<std::uint64_t, std::uint64_t>& stretches() const { return stretches_; }

  void clear() { stretches_.clear(); }

 private:
  std::map<std::uint64_t, std::uint64_t> stretches_;
};

}  // namespace adaptra::delegate
