// AdamW over a flat buffer in one pass. Plain pointers and sizes; see fused_adam.cpp for CPUs, fused_adam.cu for GPUs.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "numbers.h"

namespace megatron {

// A flat array of numbers; data is null where there is none.
struct FlatArray {
  void* data;
  NumberType type;
};

// parameter    float32 or float64: the main parameters, updated; or bfloat16, the upper halves of float32 ones
// remainder    the lower halves where the parameters are bfloat16, see numbers.h; else null
// gradient     the main parameters' type or bfloat16; left alone
// exp_avg, exp_avg_sq  likewise, each by itself; updated
// low_precision  bfloat16, float16 or none: receives the rounded parameters, bfloat16 ones as upper halves
struct AdamBuffers {
  std::int64_t size;
  FlatArray parameter, gradient, exp_avg, exp_avg_sq, low_precision;
  std::int16_t* remainder;

  bool in_halves() const { return remainder != nullptr; }
};

// Spans of consecutive elements with their own factors of learning rate and weight decay: span k ends before element
// ends[k] and begins where span k-1 ends. They tile the buffer.
struct HyperSpans {
  std::int64_t count;
  const std::int64_t* ends;
  const double* lr_multipliers;
  const double* weight_decay_multipliers;
};

// gradient_scale  what the gradients still have to be divided by
// decoupled       weight decay acts on the parameter itself (AdamW), else it is added to the gradient (L2)
struct AdamHyperParameters {
  std::int64_t step;
  double lr, weight_decay, beta1, beta2, eps, gradient_scale;
  bool decoupled;
};

// The constants of a launch, in the precision of the main parameters.
template <typename Real>
struct AdamConstants {
  Real beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  Real inverse_gradient_scale;
  Real inverse_root_correction2;
  Real step_size;  // times the span's factor
  Real decay;      // likewise; where coupled without the learning rate
  bool decoupled;

  explicit AdamConstants(const AdamHyperParameters& hyper)
      : beta1(static_cast<Real>(hyper.beta1)),
        one_minus_beta1(static_cast<Real>(1 - hyper.beta1)),
        beta2(static_cast<Real>(hyper.beta2)),
        one_minus_beta2(static_cast<Real>(1 - hyper.beta2)),
        eps(static_cast<Real>(hyper.eps)),
        inverse_gradient_scale(static_cast<Real>(1 / hyper.gradient_scale)),
        inverse_root_correction2(
            static_cast<Real>(1 / std::sqrt(1 - std::pow(hyper.beta2, static_cast<double>(hyper.step))))),
        step_size(static_cast<Real>(hyper.lr / (1 - std::pow(hyper.beta1, static_cast<double>(hyper.step))))),
        decay(static_cast<Real>(hyper.decoupled ? hyper.lr * hyper.weight_decay : hyper.weight_decay)),
        decoupled(hyper.decoupled) {}
};

// Those of a span. One of the two decays is zero.
template <typename Real>
struct SpanConstants {
  Real step_size, decay, coupled_decay;
};

template <typename Real>
MEGATRON_INLINE SpanConstants<Real> span_constants(const AdamConstants<Real>& constants, double lr_multiplier,
                                                   double weight_decay_multiplier) {
  const Real lr = static_cast<Real>(lr_multiplier);
  const Real decay = constants.decay * static_cast<Real>(weight_decay_multiplier);
  return {constants.step_size * lr, constants.decoupled ? decay * lr : Real(0), constants.decoupled ? Real(0) : decay};
}

// One element. It is computed alone, each operation rounded by itself (all sources are compiled without contraction to
// fused multiply-adds): the bits depend neither on its place, nor on threads, nor on the instruction set or the device.
// Contraction would save nothing, since memory is what the pass waits for.
//
// Decay and step are summed before they are taken from the parameter, which is then rounded once: 1 - lr * decay as one
// float32 factor would round a decay of 1e-7 a step by a fifth of itself.
template <typename Real>
MEGATRON_INLINE void adam_element(Real& parameter, Real gradient, Real& exp_avg, Real& exp_avg_sq,
                                  const AdamConstants<Real>& constants, const SpanConstants<Real>& span) {
  const Real g = gradient * constants.inverse_gradient_scale + span.coupled_decay * parameter;
  exp_avg = constants.beta1 * exp_avg + constants.one_minus_beta1 * g;
  exp_avg_sq = constants.beta2 * exp_avg_sq + constants.one_minus_beta2 * (g * g);
  const Real size = std::sqrt(exp_avg_sq) * constants.inverse_root_correction2 + constants.eps;
  parameter = parameter - (span.decay * parameter + span.step_size * (exp_avg / size));
}

// Throws std::invalid_argument for types that no kernel takes.
inline void check_types(const AdamBuffers& buffers) {
  const NumberType main = buffers.in_halves() ? NumberType::kFloat32 : buffers.parameter.type;
  const auto is_read = [main](const FlatArray& array) {
    return array.type == main || array.type == NumberType::kBFloat16;
  };
  const bool is_main = buffers.in_halves()
                           ? buffers.parameter.type == NumberType::kBFloat16
                           : main == NumberType::kFloat32 || main == NumberType::kFloat64;
  const NumberType low = buffers.low_precision.type;
  const bool is_written =
      buffers.low_precision.data == nullptr ||
      (!buffers.in_halves() && (low == NumberType::kBFloat16 || low == NumberType::kFloat16));
  if (!is_main || !is_read(buffers.gradient) || !is_read(buffers.exp_avg) || !is_read(buffers.exp_avg_sq) ||
      !is_written) {
    throw std::invalid_argument("adamw takes float32 or float64 parameters, gradients and moments of that type or "
                                "bfloat16, and a copy in bfloat16 or float16; or bfloat16 parameters with their "
                                "remainders, and no copy");
  }
}

// instruction_set  by name, see instruction_set.h
void adamw_cpu(const AdamBuffers& buffers, const HyperSpans& spans, const AdamHyperParameters& hyper,
               std::int64_t threads, const std::string& instruction_set);

// Queued on a stream (cudaStream_t) of the device with this index, on which all pointers are, those of the spans too.
// Throws std::runtime_error when the launch fails.
void adamw_cuda(const AdamBuffers& buffers, const HyperSpans& spans, const AdamHyperParameters& hyper, int device,
                void* stream);

}  // namespace megatron
