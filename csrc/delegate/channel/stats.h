// Counters of a channel, readable by any thread without a lock.
#pragma once

#include <atomic>
#include <cstdint>

namespace adaptra::delegate {

// Numbers only grow, except in_flight. Times are sums of nanoseconds over acknowledged messages: `queued` from the hand-over to
// the first chunk posted, `flight` from there to the acknowledgement.
struct Stats {
  std::atomic<std::uint64_t> posted{0};        // messages handed over by the program
  std::atomic<std::uint64_t> sent{0};          // messages of which every chunk was posted
  std::atomic<std::uint64_t> acknowledged{0};  // messages that are complete at the destination
  std::atomic<std::uint64_t> bytes{0};         // of acknowledged messages
  std::atomic<std::uint64_t> queued_ns{0};
  std::atomic<std::uint64_t> flight_ns{0};
  std::atomic<std::uint64_t> in_flight{0};       // messages begun and not acknowledged: the window in use now
  std::atomic<std::uint64_t> most_in_flight{0};  // the widest that window has been
  std::atomic<std::uint64_t> retries{0};         // messages sent again after a path failed
  std::atomic<std::uint64_t> duplicates{0};      // chunks that arrived more than once and were dropped
  std::atomic<std::uint64_t> dropped{0};         // messages of earlier attempts
  std::atomic<std::uint64_t> corrupted{0};       // chunks whose checksum was wrong
  std::atomic<std::uint64_t> path_failures{0};   // paths that were up and failed
  std::atomic<std::uint64_t> path_changes{0};    // times the traffic moved to another path

  // The longest time from the last sign of life on the path that carried the traffic until another path carried it.
  std::atomic<std::uint64_t> longest_outage_ns{0};
  std::atomic<std::uint64_t> connections{0};  // connections in use on the path that carries traffic

  // One thread writes at a time, so a plain read and write is enough, and cheaper than a locked addition.
  static void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount = 1) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  static void set(std::atomic<std::uint64_t>& counter, std::uint64_t value) noexcept {
    counter.store(value, std::memory_order_relaxed);
  }
};

}  // namespace adaptra::delegate
