// A mixture-of-experts layer.
#pragma once

#include <cstdint>

enum ExpertWeights { kFloat32, kBFloat16, kInt8, kInt4, kE2m1 };

// One of the two products of all experts. Weights are in panels, as in linear.h.
struct ExpertProduct {
  const void* panels;    // of one expert after another
  const float* bias;     // [experts, padded outputs]
  const float* factors;  // factors of 8-bit inputs
  int64_t factor_stride;  // between experts' factors
  const float* scales;    // for 8 bits: [experts, 2, padded outputs]
};

struct ExpertActivation {
  int kind;   // an Activation, in activation.h
  int gated;  // panels have kLanes outputs of the gate, then kLanes of the up projection
  float alpha, limit, offset;
};

struct ExpertsLayer {
  int64_t experts, hidden, inner;
  ExpertProduct up, down;
  ExpertActivation activation;
};

// The experts of each row and their weights. Experts that do not exist are skipped.
struct Routing {
  const int64_t* experts;
  int64_t expert_strides[2];
  const float* weights;
  int64_t weight_strides[2];
  int64_t rows, chosen;
};

// The routing that one call of this thread uses instead of its own, and where the call writes its
// own. Arrays are [rows, chosen], for the call's rows from `first` on. The same as in experts.py.
struct ForcedExperts {
  const int64_t* experts;
  const float* weights;
  int64_t* own_experts;
  float* own_weights;
  int64_t first, rows, chosen;
};
