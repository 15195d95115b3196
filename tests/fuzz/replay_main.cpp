// Runs a fuzz target over the files of the folders that are named, and with -runs=N over N changed ones, where the
// compiler has no fuzzer of its own.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t kLongest = 4096;

void run(const std::string& input, std::size_t size) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), size);
}

// A few bytes changed, removed, doubled, or taken from another input.
std::string changed(const std::vector<std::string>& inputs, std::mt19937& random) {
  std::string input = inputs[random() % inputs.size()];
  for (unsigned n = 1 + random() % 4; n > 0; --n) {
    const std::size_t at = input.empty() ? 0 : random() % input.size();
    const std::size_t length = 1 + random() % 16;
    const std::string& other = inputs[random() % inputs.size()];
    switch (random() % 6) {
      case 0:
        input.insert(at, 1, static_cast<char>(random()));
        break;
      case 1:
        input.erase(at, length);
        break;
      case 2:
        input.insert(at, input.substr(at, length));
        break;
      case 3:
        input.insert(at, other.substr(other.empty() ? 0 : random() % other.size(), length));
        break;
      default:
        if (!input.empty()) input[at] = static_cast<char>(random());
    }
  }
  input.resize(std::min(input.size(), kLongest));
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  int runs = 0;
  std::vector<std::string> inputs;
  for (int i = 1; i < argc; ++i) {
    if (std::sscanf(argv[i], "-runs=%d", &runs) == 1) continue;
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
  }
  if (inputs.empty()) return 1;
  for (const auto& input : inputs) {
    // Every shorter input too: the end of the bytes is where readers go wrong.
    for (std::size_t size = 0; size <= input.size(); ++size) run(input, size);
  }
  std::mt19937 random(1);
  for (int i = 0; i < runs; ++i) {
    const std::string input = changed(inputs, random);
    run(input, input.size());
  }
  std::printf("%zu inputs, %d changed ones\n", inputs.size(), runs);
  return 0;
}
