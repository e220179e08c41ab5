// Numbers for the links between ranks. All messages from one rank to another take the same link, whatever their stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace adaptra::schedule {

class Links {
 public:
  // The number of the link from one rank to another. A link seen for the first time gets the next number.
  std::size_t of(std::int32_t source, std::int32_t destination) {
    return numbers_.try_emplace({source, destination}, numbers_.size()).first->second;
  }

  [[nodiscard]] std::size_t size() const { return numbers_.size(); }

 private:
  std::map<std::pair<std::int32_t, std::int32_t>, std::size_t> numbers_;
};

}  // namespace adaptra::schedule
