#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "grad_norm.h"

namespace megatron {

namespace {

constexpr int kWarps = 8;  // of a block
static_assert(kLanes == 32, "a lane of the sum is a lane of a warp");

// Sum over a tile of the elements or of their squares; in lane 0 of the warp.
template <bool squared, typename Number>
__device__ __forceinline__ double tile_sum(const Number* elements, std::int64_t count) {
  double sum = 0.0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x % kLanes; i < count; i += kLanes) {
    const double value = widened<double>(elements[i]);
    sum += squared ? value * value : value;
  }
  for (int half = kLanes / 2; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  return sum;
}

// One warp a tile.
template <typename Number>
__global__ void sum_tiles(const Number* data, const std::int64_t* tiles, std::int64_t num_tiles, double* sums) {
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (tile >= num_tiles) return;
  const std::int64_t start = tiles[2 * tile];
  const double sum = tile_sum<true>(data + start, tiles[2 * tile + 1] - start);
  if (threadIdx.x % kLanes == 0) sums[tile] = sum;
}

// One warp a group.
__global__ void sum_groups(const double* values, std::int64_t count, double* sums) {
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  const std::int64_t start = group * kSumGroup;
  if (start >= count) return;
  const std::int64_t rest = count - start;
  const double sum = tile_sum<false>(values + start, rest < kSumGroup ? rest : kSumGroup);
  if (threadIdx.x % kLanes == 0) sums[group] = sum;
}

unsigned blocks_for(std::int64_t warps) { return static_cast<unsigned>((warps + kWarps - 1) / kWarps); }

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("sum of squares on a GPU: ") + cudaGetErrorString(error));
}

}  // namespace

void sum_of_squares_cuda(const void* data, NumberType type, const std::int64_t* tiles, std::int64_t num_tiles,
                         double* scratch, int device, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  check(cudaSetDevice(device));  // this copy of the CUDA runtime has not heard which one torch's has chosen
  if (num_tiles == 0) {
    check(cudaMemsetAsync(scratch, 0, sizeof(double), queue));
    return;
  }
  const unsigned blocks = blocks_for(num_tiles);
  constexpr int threads = kWarps * static_cast<int>(kLanes);
  switch (type) {
    case NumberType::kFloat64:
      sum_tiles<<<blocks, threads, 0, queue>>>(static_cast<const double*>(data), tiles, num_tiles, scratch);
      break;
    case NumberType::kFloat32:
      sum_tiles<<<blocks, threads, 0, queue>>>(static_cast<const float*>(data), tiles, num_tiles, scratch);
      break;
    case NumberType::kBFloat16:
      sum_tiles<<<blocks, threads, 0, queue>>>(static_cast<const BFloat16*>(data), tiles, num_tiles, scratch);
      break;
    default:
      throw std::invalid_argument("sum_of_squares takes float64, float32 and bfloat16");
  }
  check(cudaGetLastError());
  for (std::int64_t count = num_tiles; count > 1;) {
    const std::int64_t groups = (count + kSumGroup - 1) / kSumGroup;
    sum_groups<<<blocks_for(groups), threads, 0, queue>>>(scratch, count, scratch + count);
    check(cudaGetLastError());
    scratch += count;
    count = groups;
  }
}

}  // namespace megatron
