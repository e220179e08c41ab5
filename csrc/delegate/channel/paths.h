// The ordered list of paths of one channel: which of them are up, which one carries traffic, and why the others don't.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

// A path is up while at least one of its connections is established. It fails as a whole when any of them fails, as chunks
// posted on the others may wait for what was lost.
class Paths {
 public:
  struct Path {
    std::string name;
    std::vector<std::unique_ptr<Connection>> connections;  // established ones and those that will be
    std::vector<std::uint32_t> indices;                    // of `connections`
    std::vector<Connection*> up;
    Clock::time_point up_since;
    Clock::time_point heard;  // the last sign of life before it failed
    std::string reason = "never connected";
    std::optional<Clock::time_point> refused_at;  // see record_attempt()
  };

  explicit Paths(const std::vector<std::string>& names);

  [[nodiscard]] std::size_t size() const { return paths_.size(); }
  [[nodiscard]] const Path& operator[](std::size_t path) const { return paths_[path]; }
  [[nodiscard]] bool is_up(std::size_t path) const { return !paths_[path].up.empty(); }
  [[nodiscard]] bool any_up() const;

  // Whether this connection exists already: a new one means that its peer has given the old one up.
  [[nodiscard]] bool has(const Address& address) const;
  void add(const Address& address, std::unique_ptr<Connection> connection);

  // Records that a connection can be used from now on. Returns its path.
  std::size_t established(const Connection& connection, Clock::time_point now);
  [[nodiscard]] std::optional<std::size_t> path_of(const Connection& connection) const;

  // Closes all connections of a path; they are destroyed by reap(). Returns whether it was up.
  bool fail(std::size_t path, std::string reason);
  void reap() { closed_.clear(); }

  // Records how an attempt to connect ended. A refusal by the peer's host tells a process that has ended from one that is slow.
  // A host takes connections on behalf of each process that lives.
  void record_attempt(std::size_t path, bool was_refused, Clock::time_point now);
  // The earliest refusal, if the last attempt on each path was refused; else nothing.
  [[nodiscard]] std::optional<Clock::time_point> all_refused_at() const;

  // Chooses the path to use: the best that has been up for `healthy_for` or is the present one, else the best that is up.
  [[nodiscard]] std::optional<std::size_t> choose(std::optional<std::size_t> present, Clock::time_point now,
                                                  Clock::duration healthy_for) const;

  // A path that is up, but one of its connections has heard nothing for longer than `silence`.
  [[nodiscard]] std::optional<std::size_t> find_silent(Clock::time_point now, Clock::duration silence) const;

  // Whether some connection may still read this message.
  [[nodiscard]] bool holds(const Memory& message) const;

  // Every path with the reason why it is not up, for people.
  [[nodiscard]] std::string describe() const;

 private:
  std::vector<Path> paths_;
  std::vector<std::unique_ptr<Connection>> closed_;
};

}  // namespace adaptra::delegate
