#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "activation.h"
#include "pack.h"

namespace megatron {

namespace {

constexpr int kThreads = 256;

struct Power {
  __host__ __device__ float operator()(float x) const { return expf(x); }
  __host__ __device__ double operator()(double x) const { return exp(x); }
};

// A block a part of a row of the output, a thread a pack of it.
template <Function function, typename Number, int count>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Activation activation, void* output) {
  using Real = RealOf<Number>;
  using Numbers = Pack<Number, count>;
  const std::int64_t width = activation.width;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * count;
  if (column >= width) return;
  const std::int64_t row = blockIdx.x;
  constexpr std::int64_t inputs = function == Function::kSwiGlu ? 2 : 1;
  const auto* x = static_cast<const Number*>(activation.input) + row * inputs * width + column;
  auto* y = static_cast<Number*>(output) + row * width + column;
  auto pack = *reinterpret_cast<const Numbers*>(x);
  if constexpr (function == Function::kSwiGlu) {
    const auto up = *reinterpret_cast<const Numbers*>(x + width);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const Real gate = read_number(pack.numbers[k]);
      pack.numbers[k] = written_number<Number>(gate * sigmoid(gate, Power{}) * read_number(up.numbers[k]));
    }
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      pack.numbers[k] = written_number<Number>(gelu<Real>(read_number(pack.numbers[k]), Power{}));
    }
  }
  *reinterpret_cast<Numbers*>(y) = pack;
}

template <Function function, typename Number, int count>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Activation activation, const void* gradient, void* input_gradient) {
  using Real = RealOf<Number>;
  using Numbers = Pack<Number, count>;
  const std::int64_t width = activation.width;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * count;
  if (column >= width) return;
  const std::int64_t row = blockIdx.x;
  constexpr std::int64_t inputs = function == Function::kSwiGlu ? 2 : 1;
  const auto* x = static_cast<const Number*>(activation.input) + row * inputs * width + column;
  auto* dx = static_cast<Number*>(input_gradient) + row * inputs * width + column;
  auto pack = *reinterpret_cast<const Numbers*>(x);
  const auto passed = *reinterpret_cast<const Numbers*>(static_cast<const Number*>(gradient) + row * width + column);
  if constexpr (function == Function::kSwiGlu) {
    auto up = *reinterpret_cast<const Numbers*>(x + width);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const Real value = read_number(passed.numbers[k]);
      const GatedSlopes<Real> slopes =
          swiglu_slopes<Real>(read_number(pack.numbers[k]), read_number(up.numbers[k]), Power{});
      pack.numbers[k] = written_number<Number>(value * slopes.gate);
      up.numbers[k] = written_number<Number>(value * slopes.up);
    }
    *reinterpret_cast<Numbers*>(dx + width) = up;
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const Real slope = gelu_slope<Real>(read_number(pack.numbers[k]), Power{});
      pack.numbers[k] = written_number<Number>(read_number(passed.numbers[k]) * slope);
    }
  }
  *reinterpret_cast<Numbers*>(dx) = pack;
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("activation on a GPU: ") + cudaGetErrorString(error));
}

// Calls launch(function, number, size of a pack, grid), the first three as types.
template <typename Launch, typename... Pointers>
void with_kernel_for(const Activation& activation, int device, const Launch& launch, Pointers... pointers) {
  if (activation.rows == 0 || activation.width == 0) return;
  check(cudaSetDevice(device));  // this copy of the CUDA runtime has not heard which one torch's has chosen
  with_number_of(activation.type, [&](auto number) {
    using Number = decltype(number);
    const auto of_function = [&](auto function) {
      const auto of_size = [&](auto size) {
        const std::int64_t of_block = kThreads * decltype(size)::value;
        const dim3 grid(static_cast<unsigned>(activation.rows),
                        static_cast<unsigned>((activation.width + of_block - 1) / of_block));
        launch(function, number, size, grid);
      };
      if (packs<Number>(activation.width, activation.input, pointers...)) {
        of_size(std::integral_constant<int, kPackSize<Number>>{});
      } else {
        of_size(std::integral_constant<int, 1>{});
      }
    };
    if (activation.function == Function::kSwiGlu) {
      of_function(std::integral_constant<Function, Function::kSwiGlu>{});
    } else {
      of_function(std::integral_constant<Function, Function::kGelu>{});
    }
  });
  check(cudaGetLastError());
}

}  // namespace

void activation_cuda(const Activation& activation, void* output, int device, void* stream) {
  with_kernel_for(
      activation, device,
      [&](auto function, auto number, auto size, dim3 grid) {
        forward_kernel<decltype(function)::value, decltype(number), decltype(size)::value>
            <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(activation, output);
      },
      output);
}

void activation_gradient_cuda(const Activation& activation, const void* gradient, void* input_gradient, int device,
                              void* stream) {
  with_kernel_for(
      activation, device,
      [&](auto function, auto number, auto size, dim3 grid) {
        backward_kernel<decltype(function)::value, decltype(number), decltype(size)::value>
            <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(activation, gradient, input_gradient);
      },
      gradient, input_gradient);
}

}  // namespace megatron
