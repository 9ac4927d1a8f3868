#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "activation.h"

namespace megatron {

namespace {

constexpr int kThreads = 256;

struct Power {
  __host__ __device__ float operator()(float x) const { return expf(x); }
  __host__ __device__ double operator()(double x) const { return exp(x); }
};

// A thread an element of the output.
template <Function function, typename Number>
__global__ void forward_kernel(const Activation activation, void* output) {
  using Real = RealOf<Number>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= activation.rows * activation.width) return;
  const auto* x = static_cast<const Number*>(activation.input);
  auto* y = static_cast<Number*>(output);
  if constexpr (function == Function::kSwiGlu) {
    const std::int64_t place = i + i / activation.width * activation.width;
    const Real gate = read_number(x[place]);
    y[i] = written_number<Number>(gate * sigmoid(gate, Power{}) * read_number(x[place + activation.width]));
  } else {
    y[i] = written_number<Number>(gelu<Real>(read_number(x[i]), Power{}));
  }
}

template <Function function, typename Number>
__global__ void backward_kernel(const Activation activation, const void* gradient, void* input_gradient) {
  using Real = RealOf<Number>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= activation.rows * activation.width) return;
  const auto* x = static_cast<const Number*>(activation.input);
  auto* dx = static_cast<Number*>(input_gradient);
  const Real passed = read_number(static_cast<const Number*>(gradient)[i]);
  if constexpr (function == Function::kSwiGlu) {
    const std::int64_t gate = i + i / activation.width * activation.width;
    const std::int64_t up = gate + activation.width;
    const GatedSlopes<Real> slopes = swiglu_slopes<Real>(read_number(x[gate]), read_number(x[up]), Power{});
    dx[gate] = written_number<Number>(passed * slopes.gate);
    dx[up] = written_number<Number>(passed * slopes.up);
  } else {
    dx[i] = written_number<Number>(passed * gelu_slope<Real>(read_number(x[i]), Power{}));
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("activation on a GPU: ") + cudaGetErrorString(error));
}

unsigned blocks_for(const Activation& activation) {
  return static_cast<unsigned>((activation.rows * activation.width + kThreads - 1) / kThreads);
}

}  // namespace

void activation_cuda(const Activation& activation, void* output, int device, void* stream) {
  const unsigned blocks = blocks_for(activation);
  if (blocks == 0) return;
  check(cudaSetDevice(device));  // this copy of the CUDA runtime has not heard which one torch's has chosen
  const auto queue = static_cast<cudaStream_t>(stream);
  with_number_of(activation.type, [&](auto number) {
    using Number = decltype(number);
    if (activation.function == Function::kSwiGlu) {
      forward_kernel<Function::kSwiGlu, Number><<<blocks, kThreads, 0, queue>>>(activation, output);
    } else {
      forward_kernel<Function::kGelu, Number><<<blocks, kThreads, 0, queue>>>(activation, output);
    }
  });
  check(cudaGetLastError());
}

void activation_gradient_cuda(const Activation& activation, const void* gradient, void* input_gradient, int device,
                              void* stream) {
  const unsigned blocks = blocks_for(activation);
  if (blocks == 0) return;
  check(cudaSetDevice(device));
  const auto queue = static_cast<cudaStream_t>(stream);
  with_number_of(activation.type, [&](auto number) {
    using Number = decltype(number);
    if (activation.function == Function::kSwiGlu) {
      backward_kernel<Function::kSwiGlu, Number><<<blocks, kThreads, 0, queue>>>(activation, gradient, input_gradient);
    } else {
      backward_kernel<Function::kGelu, Number><<<blocks, kThreads, 0, queue>>>(activation, gradient, input_gradient);
    }
  });
  check(cudaGetLastError());
}

}  // namespace megatron
