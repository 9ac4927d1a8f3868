#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "fused_adam.h"

namespace megatron {

namespace {

constexpr int kThreads = 256;
// Elements of a thread, a block's width apart: neighbours read neighbours, and the reads of all of them are on their way
// before the first is needed.
constexpr int kElements = 4;

struct Pointers {
  std::int64_t size;
  void *parameter, *gradient, *exp_avg, *exp_avg_sq, *low_precision;
  std::int16_t* remainder;
  bool copy_is_bfloat16;
};

template <typename Real>
__device__ __forceinline__ void store(Real* target, Real value) {
  *target = value;
}

template <typename Real>
__device__ __forceinline__ void store(BFloat16* target, Real value) {
  *target = narrowed<BFloat16>(static_cast<float>(value));
}

// The first span that ends after an element.
__device__ __forceinline__ std::int64_t span_of(const HyperSpans& spans, std::int64_t element) {
  std::int64_t low = 0, high = spans.count - 1;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (spans.ends[middle] > element) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <typename Real>
__device__ __forceinline__ Real load_parameter(const Real* parameters, const std::int16_t*, std::int64_t i) {
  return parameters[i];
}

__device__ __forceinline__ float load_parameter(const BFloat16* uppers, const std::int16_t* lowers, std::int64_t i) {
  return joined(uppers[i], lowers[i]);
}

template <typename Real>
__device__ __forceinline__ void store_parameter(Real* parameters, std::int16_t*, std::int64_t i, Real value) {
  parameters[i] = value;
}

__device__ __forceinline__ void store_parameter(BFloat16* uppers, std::int16_t* lowers, std::int64_t i, float value) {
  uppers[i] = upper_half(value);
  lowers[i] = lower_half(value);
}

// Parameter is Real, or BFloat16 where float parameters lie in halves.
template <typename Real, typename Parameter, typename Gradient, typename ExpAvg, typename ExpAvgSq>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const Pointers pointers, const HyperSpans spans, const AdamConstants<Real> constants) {
  auto* parameters = static_cast<Parameter*>(pointers.parameter);
  const auto* gradients = static_cast<const Gradient*>(pointers.gradient);
  auto* exp_avgs = static_cast<ExpAvg*>(pointers.exp_avg);
  auto* exp_avg_sqs = static_cast<ExpAvgSq*>(pointers.exp_avg_sq);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (kThreads * kElements);
  Real parameter[kElements], gradient[kElements], exp_avg[kElements], exp_avg_sq[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const std::int64_t i = first + k * kThreads + threadIdx.x;
    if (i >= pointers.size) continue;
    parameter[k] = load_parameter(parameters, pointers.remainder, i);
    gradient[k] = widened<Real>(gradients[i]);
    exp_avg[k] = widened<Real>(exp_avgs[i]);
    exp_avg_sq[k] = widened<Real>(exp_avg_sqs[i]);
  }
  std::int64_t span = span_of(spans, first);  // the same in all threads of the block
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const std::int64_t i = first + k * kThreads + threadIdx.x;
    if (i >= pointers.size) continue;
    while (spans.ends[span] <= i) ++span;
    adam_element(parameter[k], gradient[k], exp_avg[k], exp_avg_sq[k], constants,
                 span_constants(constants, spans.lr_multipliers[span], spans.weight_decay_multipliers[span]));
    store_parameter(parameters, pointers.remainder, i, parameter[k]);
    store(exp_avgs + i, exp_avg[k]);
    store(exp_avg_sqs + i, exp_avg_sq[k]);
    if (pointers.low_precision == nullptr) continue;
    const float rounded = static_cast<float>(parameter[k]);
    if (pointers.copy_is_bfloat16) {
      static_cast<BFloat16*>(pointers.low_precision)[i] = upper_half(rounded);
    } else {
      static_cast<Float16*>(pointers.low_precision)[i] = narrowed<Float16>(rounded);
    }
  }
}

template <typename Real>
using Kernel = void (*)(const Pointers, const HyperSpans, const AdamConstants<Real>);

template <typename Real, typename Parameter, typename Gradient, typename ExpAvg>
Kernel<Real> kernel_for_exp_avg_sq(const AdamBuffers& buffers) {
  return buffers.exp_avg_sq.type == NumberType::kBFloat16 ? adamw_kernel<Real, Parameter, Gradient, ExpAvg, BFloat16>
                                                          : adamw_kernel<Real, Parameter, Gradient, ExpAvg, Real>;
}

template <typename Real, typename Parameter, typename Gradient>
Kernel<Real> kernel_for_moments(const AdamBuffers& buffers) {
  return buffers.exp_avg.type == NumberType::kBFloat16
             ? kernel_for_exp_avg_sq<Real, Parameter, Gradient, BFloat16>(buffers)
             : kernel_for_exp_avg_sq<Real, Parameter, Gradient, Real>(buffers);
}

template <typename Real, typename Parameter>
void launch(const AdamBuffers& buffers, const HyperSpans& spans, const AdamHyperParameters& hyper,
            cudaStream_t stream) {
  const Kernel<Real> kernel = buffers.gradient.type == NumberType::kBFloat16
                                  ? kernel_for_moments<Real, Parameter, BFloat16>(buffers)
                                  : kernel_for_moments<Real, Parameter, Real>(buffers);
  const Pointers pointers{buffers.size,
                          buffers.parameter.data,
                          buffers.gradient.data,
                          buffers.exp_avg.data,
                          buffers.exp_avg_sq.data,
                          buffers.low_precision.data,
                          buffers.remainder,
                          buffers.low_precision.type == NumberType::kBFloat16};
  const std::int64_t blocks = (buffers.size + kThreads * kElements - 1) / (kThreads * kElements);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(pointers, spans, AdamConstants<Real>(hyper));
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("adamw on a GPU: ") + cudaGetErrorString(error));
}

}  // namespace

void adamw_cuda(const AdamBuffers& buffers, const HyperSpans& spans, const AdamHyperParameters& hyper, int device,
                void* stream) {
  check_types(buffers);
  if (buffers.size == 0) return;
  check(cudaSetDevice(device));  // this copy of the CUDA runtime has not heard which one torch's has chosen
  if (buffers.in_halves()) {
    launch<float, BFloat16>(buffers, spans, hyper, static_cast<cudaStream_t>(stream));
  } else if (buffers.parameter.type == NumberType::kFloat64) {
    launch<double, double>(buffers, spans, hyper, static_cast<cudaStream_t>(stream));
  } else {
    launch<float, float>(buffers, spans, hyper, static_cast<cudaStream_t>(stream));
  }
  check(cudaGetLastError());
}

}  // namespace megatron
