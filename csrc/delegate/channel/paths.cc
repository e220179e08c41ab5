#include "delegate/channel/paths.h"

#include <algorithm>
#include <utility>

namespace adaptra::delegate {

Paths::Paths(const std::vector<std::string>& names) {
  for (const std::string& name : names) paths_.emplace_back().name = name;
}

bool Paths::any_up() const {
  return std::any_of(paths_.begin(), paths_.end(), [](const Path& path) { return !path.up.empty(); });
}

bool Paths::has(const Address& address) const {
  const auto& indices = paths_[address.path].indices;
  return std::find(indices.begin(), indices.end(), address.index) != indices.end();
}

void Paths::add(const Address& address, std::unique_ptr<Connection> connection) {
  Path& path = paths_[address.path];
  path.connections.push_back(std::move(connection));
  path.indices.push_back(address.index);
}

std::size_t Paths::established(const Connection& connection, Clock::time_point now) {
  const std::size_t found = path_of(connection).value();
  Path& path = paths_[found];
  if (path.up.empty()) path.up_since = now;
  path.refused_at.reset();
  path.up.push_back(const_cast<Connection*>(&connection));
  return found;
}

std::optional<std::size_t> Paths::path_of(const Connection& connection) const {
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    for (const auto& one : paths_[path].connections) {
      if (one.get() == &connection) return path;
    }
  }
  return std::nullopt;
}

bool Paths::fail(std::size_t path, std::string reason) {
  Path& failed = paths_[path];
  failed.reason = std::move(reason);
  const bool was_up = !failed.up.empty();
  for (Connection* connection : failed.up) failed.heard = std::max(failed.heard, connection->heard());
  for (auto& connection : failed.connections) {
    connection->close();
    closed_.push_back(std::move(connection));
  }
  failed.connections.clear();
  failed.indices.clear();
  failed.up.clear();
  return was_up;
}

void Paths::record_attempt(std::size_t path, bool was_refused, Clock::time_point now) {
  paths_[path].refused_at = was_refused ? std::optional(now) : std::nullopt;
}

std::optional<Clock::time_point> Paths::all_refused_at() const {
  auto earliest = Clock::time_point::max();
  for (const Path& path : paths_) {
    if (!path.refused_at) return std::nullopt;
    earliest = std::min(earliest, *path.refused_at);
  }
  return earliest;
}

std::optional<std::size_t> Paths::choose(std::optional<std::size_t> present, Clock::time_point now,
                                         Clock::duration healthy_for) const {
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    if (is_up(path) && (path == present || now - paths_[path].up_since >= healthy_for)) return path;
  }
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    if (is_up(path)) return path;
  }
  return std::nullopt;
}

std::optional<std::size_t> Paths::find_silent(Clock::time_point now, Clock::duration silence) const {
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    for (Connection* connection : paths_[path].up) {
      if (now - std::max(connection->heard(), paths_[path].up_since) > silence) return path;
    }
  }
  return std::nullopt;
}

bool Paths::holds(const Memory& message) const {
  for (const Path& path : paths_) {
    for (const auto& connection : path.connections) {
      if (connection->holds(message)) return true;
    }
  }
  return std::any_of(closed_.begin(), closed_.end(), [&](const auto& connection) { return connection->holds(message); });
}

std::string Paths::describe() const {
  std::string text;
  for (const Path& path : paths_) {
    if (!text.empty()) text += ", ";
    text += path.name + " (" + (path.up.empty() ? path.reason : "up") + ")";
  }
  return text;
}

}  // namespace adaptra::delegate
