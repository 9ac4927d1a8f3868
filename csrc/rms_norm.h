// RMSNorm over rows. Plain pointers and sizes; see rms_norm.cpp for CPUs, rms_norm.cu for GPUs.
#pragma once

#include <cstdint>
#include <string>

#include "activation_math.h"

namespace megatron {

// All numbers are of one type, read as Real: float64 for float64, else float32.
// input    [rows][width]
// weight   [width]
// inverse  [rows] Real, written by the forward, read by the backward: 1 / root of (the mean square + epsilon)
struct RmsNorm {
  NumberType type;
  std::int64_t rows, width;
  const void *input, *weight;
  void* inverse;
};

// gradient          [rows][width] of the output
// input_gradient    [rows][width], written
// weight_gradients  [groups][width] Real, written: sums over `group` rows of the input each, in their order
struct RmsNormGradient {
  const void* gradient;
  void *input_gradient, *weight_gradients;
  std::int64_t group;
};

// output           [rows][width], written
// instruction_set  by name, see instruction_set.h; with "generic" operations round twice where the others have fused
//                  multiply-adds; neither threads nor the other sets change a bit.
void rms_norm_cpu(const RmsNorm& norm, void* output, double epsilon, std::int64_t threads,
                  const std::string& instruction_set);
void rms_norm_gradient_cpu(const RmsNorm& norm, const RmsNormGradient& out, std::int64_t threads,
                           const std::string& instruction_set);

// Queued on a stream (cudaStream_t) of the device with this index, on which all pointers are.
// Throw std::runtime_error when the launch fails.
void rms_norm_cuda(const RmsNorm& norm, void* output, double epsilon, int device, void* stream);
void rms_norm_gradient_cuda(const RmsNorm& norm, const RmsNormGradient& out, int device, void* stream);

}  // namespace megatron
