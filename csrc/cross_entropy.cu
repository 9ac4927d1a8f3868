#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cross_entropy.h"
#include "pack.h"

namespace megatron {

namespace {

constexpr int kThreads = 256;  // one block a row
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

__device__ __forceinline__ float power_of_e(float x) { return expf(x); }
__device__ __forceinline__ double power_of_e(double x) { return exp(x); }

template <typename Real>
__device__ __forceinline__ Real lowest() {
  return static_cast<Real>(-INFINITY);
}

// A maximum, and the sum of e**(x - maximum).
template <typename Real>
struct Softmax {
  Real maximum, sum;
};

// e**(x - maximum), where nothing has been seen yet for a maximum of -infinity.
template <typename Real>
__device__ __forceinline__ Real relative(Real x, Real maximum) {
  return power_of_e(x - (maximum == lowest<Real>() ? Real(0) : maximum));
}

template <typename Real>
__device__ __forceinline__ Softmax<Real> merged(Softmax<Real> a, Softmax<Real> b) {
  const Real maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
  return {maximum, a.sum * relative(a.maximum, maximum) + b.sum * relative(b.maximum, maximum)};
}

template <typename Real>
__device__ __forceinline__ Softmax<Real> shuffled_down(Softmax<Real> value, int distance) {
  return {__shfl_down_sync(0xffffffffu, value.maximum, distance), __shfl_down_sync(0xffffffffu, value.sum, distance)};
}

template <typename Real>
__device__ __forceinline__ Real merged(Real a, Real b) {
  return a + b;
}

template <typename Real>
__device__ __forceinline__ Real shuffled_down(Real value, int distance) {
  return __shfl_down_sync(0xffffffffu, value, distance);
}

// Over the block; the result is in thread 0.
template <typename Value>
__device__ Value reduced(Value value) {
  __shared__ Value of_warps[kWarps];
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = merged(value, shuffled_down(value, distance));
  }
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) value = merged(value, of_warps[warp]);
  }
  return value;
}

template <typename Number, int count>
__global__ void __launch_bounds__(kThreads) statistics_kernel(const Logits logits, const LogitStatistics out) {
  using Real = RealOf<Number>;
  const std::int64_t row = blockIdx.x;
  const auto* x = static_cast<const Number*>(logits.data) + row * logits.width;
  Softmax<Real> softmax{lowest<Real>(), Real(0)};
  Real logit_sum(0);
  for (std::int64_t start = threadIdx.x * count; start < logits.valid; start += kThreads * count) {
    const auto pack = *reinterpret_cast<const Pack<Number, count>*>(x + start);
    Real values[count];
    Real maximum = softmax.maximum;
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const bool takes_part = start + k < logits.valid;
      values[k] = takes_part ? read_number(pack.numbers[k]) : lowest<Real>();
      maximum = values[k] > maximum ? values[k] : maximum;
      if (out.logit_sum != nullptr && takes_part) logit_sum += values[k];
    }
    Real sum = softmax.sum * relative(softmax.maximum, maximum);
#pragma unroll
    for (int k = 0; k < count; ++k) sum += relative(values[k], maximum);
    softmax = {maximum, sum};
  }
  softmax = reduced(softmax);
  if (out.logit_sum != nullptr) logit_sum = reduced(logit_sum);
  if (threadIdx.x != 0) return;
  const std::int64_t target = logits.targets[row];
  const bool is_here = target >= 0 && target < logits.valid;
  static_cast<Real*>(out.maximum)[row] = softmax.maximum;
  static_cast<Real*>(out.sum)[row] = softmax.sum;
  static_cast<Real*>(out.target_logit)[row] = is_here ? read_number(x[target]) : Real(0);
  if (out.logit_sum != nullptr) static_cast<Real*>(out.logit_sum)[row] = logit_sum;
}

template <typename Number, int count>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const Logits logits, const LogitGradient out) {
  using Real = RealOf<Number>;
  const std::int64_t row = blockIdx.x;
  const auto* x = static_cast<const Number*>(logits.data) + row * logits.width;
  auto* gradient = static_cast<Number*>(out.gradient) + row * logits.width;
  const Real maximum = static_cast<const Real*>(out.maximum)[row];
  const Real scale = static_cast<const Real*>(out.scale)[row];
  const Real inverse_sum = Real(1) / static_cast<const Real*>(out.sum)[row];
  const Real on_each = static_cast<Real>(out.on_each);
  const Real on_target = static_cast<Real>(out.on_target);
  const std::int64_t target = logits.targets[row];
  for (std::int64_t start = threadIdx.x * count; start < logits.width; start += kThreads * count) {
    auto pack = *reinterpret_cast<const Pack<Number, count>*>(x + start);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const std::int64_t column = start + k;
      const Real probability = power_of_e(read_number(pack.numbers[k]) - maximum) * inverse_sum;
      const Real subtracted = column == target ? on_each + on_target : on_each;
      pack.numbers[k] = column < logits.valid ? written_number<Number>((probability - subtracted) * scale) : Number{};
    }
    *reinterpret_cast<Pack<Number, count>*>(gradient + start) = pack;
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("cross entropy on a GPU: ") + cudaGetErrorString(error));
}

template <typename Number, int count>
void launch(const Logits& logits, const LogitStatistics& out, cudaStream_t stream) {
  statistics_kernel<Number, count><<<static_cast<unsigned>(logits.rows), kThreads, 0, stream>>>(logits, out);
}

template <typename Number, int count>
void launch(const Logits& logits, const LogitGradient& out, cudaStream_t stream) {
  gradient_kernel<Number, count><<<static_cast<unsigned>(logits.rows), kThreads, 0, stream>>>(logits, out);
}

const void* written(const LogitStatistics&) { return nullptr; }
const void* written(const LogitGradient& out) { return out.gradient; }

template <typename Number, typename Output>
void launch_for(const Logits& logits, const Output& out, cudaStream_t stream) {
  if (packs<Number>(logits.width, logits.data, written(out))) {
    launch<Number, kPackSize<Number>>(logits, out, stream);
  } else {
    launch<Number, 1>(logits, out, stream);
  }
}

template <typename Output>
void run(const Logits& logits, const Output& out, int device, void* stream) {
  if (logits.rows == 0) return;
  check(cudaSetDevice(device));  // this copy of the CUDA runtime has not heard which one torch's has chosen
  const auto queue = static_cast<cudaStream_t>(stream);
  with_number_of(logits.type, [&](auto number) { launch_for<decltype(number)>(logits, out, queue); });
  check(cudaGetLastError());
}

}  // namespace

void logit_statistics_cuda(const Logits& logits, const LogitStatistics& statistics, int device, void* stream) {
  run(logits, statistics, device, stream);
}

void logit_gradient_cuda(const Logits& logits, const LogitGradient& gradient, int device, void* stream) {
  run(logits, gradient, device, stream);
}

}  // namespace megatron
