// Stands in for libFuzzer where the compiler is not Clang: runs every file of a corpus, then changes them at random for some
// seconds.
//   delegate_fuzz SECONDS CORPUS_FOLDER
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;

Input changed(Input input, std::mt19937& rng) {
  const auto changes = 1 + rng() % 6;
  for (auto left = changes; left > 0; --left) {
    const std::size_t at = input.empty() ? 0 : rng() % input.size();
    const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (rng() % 4) {
      case 0:
        if (!input.empty()) *place = static_cast<std::uint8_t>(rng());
        break;
      case 1: input.insert(place, static_cast<std::uint8_t>(rng())); break;
      case 2:
        if (!input.empty()) input.erase(place);
        break;
      case 3: {
        const Input again(place, input.end());
        if (input.size() < 4096) input.insert(input.end(), again.begin(), again.end());
        break;
      }
    }
  }
  return input;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fputs("usage: delegate_fuzz SECONDS CORPUS_FOLDER\n", stderr);
    return 2;
  }
  std::vector<Input> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[2])) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(corpus.back().data(), corpus.back().size());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s holds no inputs\n", arguments[2]);
    return 2;
  }
  std::mt19937 rng(7);
  std::uint64_t runs = corpus.size();
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[1]));
  for (; std::chrono::steady_clock::now() < until; ++runs) {
    const Input input = changed(corpus[rng() % corpus.size()], rng);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%llu inputs, none of which did harm\n", static_cast<unsigned long long>(runs));
  return 0;
}
