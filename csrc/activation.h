// The functions inside an MLP and their gradients. Plain pointers and sizes; see activation.cpp for CPUs, activation.cu
// for GPUs.
#pragma once

#include <cstdint>
#include <string>

#include "activation_math.h"

namespace megatron {

// kGelu    x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x**3), which is GELU by tanh
// kSwiGlu  g * sigmoid(g) * x for rows [g, x]
enum class Function { kGelu, kSwiGlu };

// input   [rows][width], with kSwiGlu [rows][2 width]: float64, float32, bfloat16 or float16; computed in float64 for
//         float64, else in float32
struct Activation {
  Function function;
  NumberType type;
  std::int64_t rows, width;
  const void* input;
};

// output          [rows][width], written
// gradient        [rows][width] of the output
// input_gradient  of the shape of the input, written
// instruction_set by name, see instruction_set.h; with "generic" operations round twice where the others have fused
//                 multiply-adds; neither threads nor the other sets change a bit.
void activation_cpu(const Activation& activation, void* output, std::int64_t threads,
                    const std::string& instruction_set);
void activation_gradient_cpu(const Activation& activation, const void* gradient, void* input_gradient,
                             std::int64_t threads, const std::string& instruction_set);

// Queued on a stream (cudaStream_t) of the device with this index, on which all pointers are.
// Throw std::runtime_error when the launch fails.
void activation_cuda(const Activation& activation, void* output, int device, void* stream);
void activation_gradient_cuda(const Activation& activation, const void* gradient, void* input_gradient, int device,
                              void* stream);

// What both kinds of processor compute; `power` is e**x.
constexpr double kGeluScale = 1.5957691216057308;  // 2 sqrt(2 / pi)
constexpr double kGeluCube = 0.044715;

template <typename Real, typename Power>
MEGATRON_INLINE Real sigmoid(Real x, const Power& power) {
  return Real(1) / (Real(1) + power(-x));
}

template <typename Real, typename Power>
MEGATRON_INLINE Real gelu(Real x, const Power& power) {
  const Real argument = static_cast<Real>(kGeluScale) * x * (Real(1) + static_cast<Real>(kGeluCube) * x * x);
  return x * sigmoid(argument, power);
}

template <typename Real, typename Power>
MEGATRON_INLINE Real gelu_slope(Real input, const Power& power) {
  // From here on the sigmoid is 0 or 1 and the slope too; what it is multiplied by would be infinite for large inputs.
  constexpr Real kFlat = 64;
  const Real below = input > kFlat ? kFlat : input;
  const Real x = below < -kFlat ? -kFlat : below;
  const Real cube = static_cast<Real>(kGeluCube) * x * x;
  const Real share = sigmoid(static_cast<Real>(kGeluScale) * x * (Real(1) + cube), power);
  const Real inner = static_cast<Real>(kGeluScale) * x * (Real(1) + Real(3) * cube);
  return share + share * (Real(1) - share) * inner;
}

// The two factors of the gradient of g * sigmoid(g) * x: of g and of x.
template <typename Real>
struct GatedSlopes {
  Real gate, up;
};

template <typename Real, typename Power>
MEGATRON_INLINE GatedSlopes<Real> swiglu_slopes(Real gate, Real up, const Power& power) {
  const Real share = sigmoid(gate, power);
  return {up * share * (Real(1) + gate * (Real(1) - share)), gate * share};
}

}  // namespace megatron
