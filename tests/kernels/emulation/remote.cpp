// Runs operators on an emulated CPU. emulated_operators.py sends each call to stdin, and reads the
// tensors and the result from stdout.

#include <cstdio>
#include <cstring>
#include <vector>

#include "linear.h"
#include "operators.h"

extern "C" {
void octavo_set_threads(int number);
const char* octavo_signature(const char* name);
const char* octavo_call(const char* name, const int64_t* words, const View* views, View* made);
const char* octavo_isa();
}

namespace {

// The same as in emulated_operators.py.
struct Call {
  char name[32];
  int64_t threads, words, views;
  int64_t addressed;  // whether the second tensor has addresses, which are 1 + places in the last one
};

bool read(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }
void write(const void* from, size_t bytes) { std::fwrite(from, 1, bytes, stdout); }

}  // namespace

int main() {
  const int64_t panel = kPanel;
  write(&panel, sizeof panel);
  std::printf("%-16s", octavo_isa());
  std::fflush(stdout);
  for (Call call; read(&call, sizeof call); std::fflush(stdout)) {
    std::vector<int64_t> words(call.words), bytes(call.views);
    std::vector<View> views(call.views);
    std::vector<std::vector<uint64_t>> memory(call.views);  // aligned for all
    if (!read(words.data(), 8 * words.size()) || !read(bytes.data(), 8 * bytes.size()) ||
        !read(views.data(), sizeof(View) * views.size()))
      return 1;
    for (int64_t i = 0; i < call.views; i++) {
      memory[i].resize((bytes[i] + 7) / 8);
      if (!read(memory[i].data(), bytes[i])) return 1;
      views[i].data = memory[i].data();
    }
    if (call.addressed)
      for (uint64_t& at : memory[1])
        if (at) at += reinterpret_cast<uint64_t>(views.back().data) - 1;
    octavo_set_threads(call.threads);
    View made{};
    const char* const problem = octavo_call(call.name, words.data(), views.data(), &made);
    char message[256] = {};
    if (problem) std::strncpy(message, problem, sizeof message - 1);
    write(message, sizeof message);
    for (int64_t i = 0; i < call.views; i++) write(memory[i].data(), bytes[i]);
    write(&made, sizeof made);
    int64_t elements = made.dimensions > 0;
    for (int i = 0; i < made.dimensions; i++) elements *= made.sizes[i];
    if (!problem) write(made.data, elements * bytes_of(made.dtype));
  }
}
