// Calls operators: one by one for PyTorch's dispatcher, and in programs.
//
// Programs: a traced step's calls of Octavo's operators, run without Python and PyTorch's
// dispatcher, which would take longer than a small model's products.
//
// program.py writes them, as words of 64 bits. Tensors have numbers: first a program's inputs, then
// its results. Sizes are linear in a step's number of tokens and of rows.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "operators.h"

namespace {

struct LibraryOpaque;
using Library = LibraryOpaque*;

extern "C" {
Error aoti_torch_get_dim(Tensor tensor, int64_t* dimensions);
Error aoti_torch_get_sizes(Tensor tensor, int64_t** sizes);
Error aoti_torch_get_strides(Tensor tensor, int64_t** strides);
Error aoti_torch_get_dtype(Tensor tensor, int32_t* dtype);
Error aoti_torch_delete_tensor_object(Tensor tensor);
Error aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line,
                                       Library* made);
Error aoti_torch_library_init_impl(const char* name, const char* key, const char* file,
                                   uint32_t line, Library* made);
Error aoti_torch_library_def(Library library, const char* schema);
Error aoti_torch_library_impl(Library library, const char* name,
                              void (*function)(Value*, uint64_t, uint64_t));
}

// The first word of an instruction that is not the number of an operator; the same as in
// program.py.
//
//   operator  result, output (or -1), arguments...
//   kView     result, tensor, bytes of an element, dimensions, sizes..., strides..., offset
//   kFree     tensor
//
// A size, a stride or an offset is three words: a constant, and factors of tokens and of rows.
enum { kView = -1, kFree = -2 };

// A program; the same as in program.py, which owns the memory behind its pointers.
struct Program {
  const int64_t* words;
  const View* constants;
  int64_t num_words, num_tensors;
};

// PyTorch tensors that a run owns.
struct Owned {
  std::vector<Tensor> tensors;
  ~Owned() {
    for (Tensor tensor : tensors)
      if (tensor) aoti_torch_delete_tensor_object(tensor);
  }
};

View view_of(Tensor tensor) {
  View view{};
  int64_t dimensions = 0, *sizes = nullptr, *strides = nullptr;
  aoti_torch_get_dim(tensor, &dimensions);
  if (dimensions > kMaxDimensions) throw std::runtime_error("a tensor has too many dimensions");
  aoti_torch_get_data_ptr(tensor, &view.data);
  aoti_torch_get_dtype(tensor, &view.dtype);
  aoti_torch_get_sizes(tensor, &sizes);
  aoti_torch_get_strides(tensor, &strides);
  view.dimensions = static_cast<int32_t>(dimensions);
  std::copy_n(sizes, dimensions, view.sizes);
  std::copy_n(strides, dimensions, view.strides);
  return view;
}

// One run of a program.
class Run {
 public:
  Run(const Program& program, int64_t tokens, int64_t rows, const Owned& inputs, Owned& outputs)
      : program_(program), tokens_(tokens), rows_(rows), outputs_(outputs),
        views_(program.num_tensors), memory_(program.num_tensors) {
    for (size_t i = 0; i < inputs.tensors.size(); i++) views_[i] = view_of(inputs.tensors[i]);
  }

  void run() {
    const int64_t* const end = program_.words + program_.num_words;
    for (const int64_t* word = program_.words; word < end;) {
      const int64_t code = *word++;
      if (code == kFree)
        memory_[*word++].reset();
      else if (code == kView)
        word = view(word);
      else
        word = call(operators()[code], word);
    }
  }

 private:
  const int64_t* call(const Operator& called, const int64_t* word) {
    const int64_t made = *word++, output = *word++;
    Tensor* const tensor = output < 0 ? nullptr : &outputs_.tensors[output];
    const Result result{&views_[made], tensor ? nullptr : &memory_[made], tensor};
    called.run(result, word, {program_.constants, views_.data()});
    return word + called.signature.size();
  }

  const int64_t* view(const int64_t* word) {
    View& made = views_[*word++];
    const View& base = Tensors{program_.constants, views_.data()}[*word++];
    const int64_t bytes = *word++;
    made.dtype = base.dtype;
    made.dimensions = static_cast<int32_t>(*word++);
    for (int i = 0; i < made.dimensions; i++, word += 3) made.sizes[i] = at(word);
    for (int i = 0; i < made.dimensions; i++, word += 3) made.strides[i] = at(word);
    made.data = base.as<char>() + bytes * at(word);
    return word + 3;
  }

  int64_t at(const int64_t* word) const { return word[0] + word[1] * tokens_ + word[2] * rows_; }

  const Program& program_;
  const int64_t tokens_, rows_;
  Owned& outputs_;
  std::vector<View> views_;
  std::vector<Memory> memory_;
};

// Runs a program with PyTorch's calling convention: its address, the step's tokens and rows, and
// the inputs. Throws exceptions that PyTorch raises in Python.
void run(Value* stack, uint64_t num_arguments, uint64_t num_outputs) {
  constexpr uint64_t kNumbers = 3;
  Owned inputs, outputs;
  for (uint64_t i = kNumbers; i < num_arguments; i++)
    inputs.tensors.push_back(reinterpret_cast<Tensor>(stack[i]));
  outputs.tensors.resize(num_outputs);
  Run(*reinterpret_cast<const Program*>(stack[0]), static_cast<int64_t>(stack[1]),
      static_cast<int64_t>(stack[2]), inputs, outputs)
      .run();
  for (uint64_t i = 0; i < num_outputs; i++)
    stack[i] = reinterpret_cast<Value>(outputs.tensors[i]);
  outputs.tensors.clear();
}

// The text of a list: "Tensor x0, Tensor x1, ...".
std::string list(const char* each, int count) {
  std::string words;
  for (int i = 0; i < count; i++) {
    words += i ? ", " : "";
    words += each;
    words += std::to_string(i);
  }
  return words;
}

// The libraries that define and implement PyTorch's operators in a namespace.
struct Namespace {
  Library definitions, kernels;

  explicit Namespace(const char* name) {
    if (aoti_torch_library_init_fragment(name, __FILE__, __LINE__, &definitions) ||
        aoti_torch_library_init_impl(name, "CPU", __FILE__, __LINE__, &kernels))
      throw std::runtime_error("PyTorch refuses a library");
  }
};

Namespace& engine_operators() {
  static Namespace own("octavo");
  return own;
}

// Defines and implements an operator of the kernels' own namespace.
Error define(const Operator& defined) {
  static Namespace own("octavo_cpu");
  std::string arguments;
  for (size_t i = 0; i < defined.signature.size(); i++) {
    const char letter = defined.signature[i];
    const char* const type = letter == 't'   ? "Tensor x"
                             : letter == 'o' ? "Tensor? x"
                             : letter == 'f' ? "float x"
                             : letter == 'b' ? "bool x"
                                             : "int x";
    arguments += (i ? ", " : "") + (type + std::to_string(i));
  }
  const std::string schema =
      defined.name + ("(" + arguments) + (defined.makes ? ") -> Tensor" : ") -> ()");
  return aoti_torch_library_def(own.definitions, schema.c_str()) ||
         aoti_torch_library_impl(own.kernels, defined.name, defined.boxed);
}

}  // namespace

void call_boxed(const Operator& called, Value* stack) {
  const size_t count = called.signature.size();
  Owned owned;
  owned.tensors.resize(count + 1);
  Tensor& made = owned.tensors[count];
  for (size_t i = 0; i < count; i++) {
    if (called.signature[i] == 't') owned.tensors[i] = reinterpret_cast<Tensor>(stack[i]);
    if (called.signature[i] != 'o' || !stack[i]) continue;
    const std::unique_ptr<Value> held(reinterpret_cast<Value*>(stack[i]));
    owned.tensors[i] = reinterpret_cast<Tensor>(*held);
  }
  View views[kMostArguments], view;
  int64_t words[kMostArguments];
  for (size_t i = 0; i < count; i++) {
    const bool is_tensor = called.signature[i] == 't' || called.signature[i] == 'o';
    words[i] = !is_tensor ? static_cast<int64_t>(stack[i]) : owned.tensors[i] ? i : -1;
    if (owned.tensors[i]) views[i] = view_of(owned.tensors[i]);
  }
  called.run({&view, nullptr, &made}, words, {nullptr, views});
  if (called.makes) stack[0] = reinterpret_cast<Value>(std::exchange(made, nullptr));
}

// Returns an operator's name, and sets its signature; null past the last one.
extern "C" const char* octavo_operator(int64_t number, const char** signature) {
  if (number >= static_cast<int64_t>(operators().size())) return nullptr;
  *signature = operators()[number].signature.c_str();
  return operators()[number].name;
}

// Makes all operators PyTorch's, as octavo_cpu::<name>; may be called again.
extern "C" Error octavo_define_operators() {
  static const Error error =
      !std::all_of(operators().begin(), operators().end(),
                   [](const Operator& each) { return define(each) == 0; });
  return error;
}

// Makes an operator the kernel of `octavo::<name>`.
extern "C" Error octavo_implement(int64_t number) {
  const Operator& chosen = operators()[number];
  return aoti_torch_library_impl(engine_operators().kernels, chosen.name, chosen.boxed);
}

// Registers `octavo::<name>`, which runs programs with these numbers of inputs and outputs: (int
// program, int tokens, int rows, Tensor x0, ...) -> (Tensor y0, ...).
extern "C" Error octavo_register_run(const char* name, int inputs, int outputs) {
  const std::string schema = name + ("(int program, int tokens, int rows, " +
                             list("Tensor x", inputs)) + ") -> (" + list("Tensor y", outputs) + ")";
  return aoti_torch_library_def(engine_operators().definitions, schema.c_str()) ||
         aoti_torch_library_impl(engine_operators().kernels, name, run);
}
