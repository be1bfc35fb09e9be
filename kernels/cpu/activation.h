// The activations between an expert's two products; kernels/activation.py defines them.
#pragma once

#include "experts.h"
#include "vector.h"

enum Activation { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

// x / (1 + e^-z)
inline Floats times_sigmoid(Floats x, Floats z) {
  const Floats power = min(z * -1.4426950f, broadcast(126.f));  // exponent of 2, bounded
  return x / (1.f + exp2(power));
}

// The error function, to 2e-7 (Abramowitz and Stegun 1964, equation 7.1.26).
__attribute__((always_inline)) inline Floats erf(Floats x) {
  const Floats magnitude = max(x, -x);
  const Floats t = 1.f / (1.f + 0.3275911f * magnitude);
  Floats p = broadcast(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats result = 1.f - p * t * exp2(magnitude * magnitude * -1.4426950f);
  return x < 0 ? -result : result;
}

__attribute__((always_inline)) inline Floats activate(Floats x, int kind, float alpha) {
  switch (kind) {
    case kSilu: return times_sigmoid(x, x * alpha);
    case kGelu: return 0.5f * x * (1.f + erf(x * 0.70710678f));
    // (1 + tanh(z)) / 2 is the sigmoid of 2 z.
    case kGeluTanh: return times_sigmoid(x, 1.5957691f * (x + 0.044715f * x * x * x));
  }
  const Floats positive = max(x, Floats{});
  return kind == kRelu ? positive : positive * positive;
}

// Returns the activation of a gate and an up projection.
inline Floats activate_gated(Floats gate, Floats up, const ExpertActivation& activation) {
  if (activation.limit) {
    const Floats limit = broadcast(activation.limit);
    gate = min(gate, limit);
    up = max(min(up, limit), -limit);
  }
  return activate(gate, activation.kind, activation.alpha) * (up + activation.offset);
}
