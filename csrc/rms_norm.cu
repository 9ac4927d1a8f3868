#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "rms_norm.h"

namespace megatron {

namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;

// The sum over the block, in all its threads.
template <typename Real>
__device__ Real block_sum(Real value) {
  __shared__ Real of_warps[kWarps];
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, distance);
  }
  __syncthreads();  // the sum before has been read
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  Real total(0);
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp];
  return total;
}

// One block a row.
template <typename Number>
__global__ void __launch_bounds__(kThreads) forward_kernel(const RmsNorm norm, void* output, double epsilon) {
  using Real = RealOf<Number>;
  const std::int64_t row = blockIdx.x;
  const auto* x = static_cast<const Number*>(norm.input) + row * norm.width;
  const auto* weight = static_cast<const Number*>(norm.weight);
  auto* y = static_cast<Number*>(output) + row * norm.width;
  Real squares(0);
  for (std::int64_t i = threadIdx.x; i < norm.width; i += kThreads) {
    const Real value = read_number(x[i]);
    squares += value * value;
  }
  const Real mean_square = block_sum(squares) / static_cast<Real>(norm.width);
  const Real inverse = Real(1) / sqrt(mean_square + static_cast<Real>(epsilon));
  for (std::int64_t i = threadIdx.x; i < norm.width; i += kThreads) {
    y[i] = written_number<Number>(read_number(x[i]) * inverse * read_number(weight[i]));
  }
  if (threadIdx.x == 0) static_cast<Real*>(norm.inverse)[row] = inverse;
}

// One block a row.
template <typename Number>
__global__ void __launch_bounds__(kThreads) input_gradient_kernel(const RmsNorm norm, const RmsNormGradient out) {
  using Real = RealOf<Number>;
  const std::int64_t row = blockIdx.x;
  const auto* x = static_cast<const Number*>(norm.input) + row * norm.width;
  const auto* gradient = static_cast<const Number*>(out.gradient) + row * norm.width;
  const auto* weight = static_cast<const Number*>(norm.weight);
  auto* input_gradient = static_cast<Number*>(out.input_gradient) + row * norm.width;
  const Real inverse = static_cast<const Real*>(norm.inverse)[row];
  Real along(0);
  for (std::int64_t i = threadIdx.x; i < norm.width; i += kThreads) {
    along += read_number(gradient[i]) * read_number(weight[i]) * read_number(x[i]);
  }
  const Real slope = block_sum(along) * inverse / static_cast<Real>(norm.width);
  for (std::int64_t i = threadIdx.x; i < norm.width; i += kThreads) {
    const Real scaled = read_number(x[i]) * inverse;
    const Real passed = read_number(gradient[i]) * read_number(weight[i]);
    input_gradient[i] = written_number<Number>((passed - scaled * slope) * inverse);
  }
}

// A thread a column of a group of rows.
template <typename Number>
__global__ void __launch_bounds__(kThreads) weight_gradient_kernel(const RmsNorm norm, const RmsNormGradient out) {
  using Real = RealOf<Number>;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= norm.width) return;
  const std::int64_t group = blockIdx.x;
  const std::int64_t end = (group + 1) * out.group < norm.rows ? (group + 1) * out.group : norm.rows;
  Real weight_gradient(0);
  for (std::int64_t row = group * out.group; row < end; ++row) {
    const Real x = read_number(static_cast<const Number*>(norm.input)[row * norm.width + column]);
    const Real gradient = read_number(static_cast<const Number*>(out.gradient)[row * norm.width + column]);
    weight_gradient += gradient * (x * static_cast<const Real*>(norm.inverse)[row]);
  }
  static_cast<Real*>(out.weight_gradients)[group * norm.width + column] = weight_gradient;
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("RMSNorm on a GPU: ") + cudaGetErrorString(error));
}

}  // namespace

void rms_norm_cuda(const RmsNorm& norm, void* output, double epsilon, int device, void* stream) {
  if (norm.rows == 0 || norm.width == 0) return;
  check(cudaSetDevice(device));  // this copy of the CUDA runtime has not heard which one torch's has chosen
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto rows = static_cast<unsigned>(norm.rows);
  with_number_of(norm.type, [&](auto number) {
    forward_kernel<decltype(number)><<<rows, kThreads, 0, queue>>>(norm, output, epsilon);
  });
  check(cudaGetLastError());
}

void rms_norm_gradient_cuda(const RmsNorm& norm, const RmsNormGradient& out, int device, void* stream) {
  if (norm.rows == 0 || norm.width == 0) return;
  check(cudaSetDevice(device));
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto rows = static_cast<unsigned>(norm.rows);
  // Groups in the dimension of a grid that may be longer than 65,535.
  const dim3 groups(static_cast<unsigned>((norm.rows + out.group - 1) / out.group),
                    static_cast<unsigned>((norm.width + kThreads - 1) / kThreads));
  with_number_of(norm.type, [&](auto number) {
    using Number = decltype(number);
    input_gradient_kernel<Number><<<rows, kThreads, 0, queue>>>(norm, out);
    weight_gradient_kernel<Number><<<groups, kThreads, 0, queue>>>(norm, out);
  });
  check(cudaGetLastError());
}

}  // namespace megatron
