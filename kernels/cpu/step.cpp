// The current step, and the table of operators.

#include "operators.h"

__thread Step step;
__thread const StepAdapters* adapters;
__thread Spent spent;

std::vector<Operator>& operators() {
  static std::vector<Operator> all;
  return all;
}

// Sets this thread's step for the operators; null: none. The memory that it points to must outlive
// their calls.
extern "C" void octavo_set_step(const Step* within) { step = within ? *within : Step(); }

// Sets this thread's adapters for the operators; null: none. They must outlive their calls.
extern "C" void octavo_set_adapters(const StepAdapters* within) { adapters = within; }

// Returns the seconds of this thread's steps since its previous call.
extern "C" Spent octavo_take_spent() {
  const Spent result = spent;
  spent = {};
  return result;
}
