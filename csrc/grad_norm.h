// Sum of squares of parts of a flat tensor. Plain pointers and sizes; see grad_norm.cpp for CPUs, grad_norm.cu for GPUs.
#pragma once

#include <cstdint>
#include <string>

#include "numbers.h"

namespace megatron {

// How the sum is formed, the same wherever it runs, so that its bits depend on the tiles alone. The squares of a tile are
// added up in 32 lanes, element i of it in lane i % 32 (the lanes of a warp on a GPU; the vectors of a CPU), and the lanes
// in five halvings; the sums of the tiles likewise, in groups, until one number is left.
// All in float64: float32 and bfloat16 numbers have exact squares in it, whose sum can not overflow. So the sum is finite
// exactly if all elements are, and no separate flag is needed; float64 elements from 1e150 or so are the exception.
constexpr std::int64_t kLanes = 32;
constexpr std::int64_t kSumGroup = 4096;

// data       float64, float32 or bfloat16
// tiles      [num_tiles][2] first and last + 1 element of each tile; some thousand elements share the work best
// Throws std::invalid_argument for another type or an instruction set that this processor does not have.
double sum_of_squares_cpu(const void* data, NumberType type, const std::int64_t* tiles, std::int64_t num_tiles,
                          std::int64_t threads, const std::string& instruction_set);

// Numbers of scratch that the sum on a GPU needs; at least one.
constexpr std::int64_t sum_of_squares_scratch(std::int64_t num_tiles) {
  std::int64_t size = 1;
  for (std::int64_t level = num_tiles; level > 1; level = (level + kSumGroup - 1) / kSumGroup) size += level;
  return size;
}

// scratch    [sum_of_squares_scratch(num_tiles)] float64; its last number receives the sum
// Queued on a stream (cudaStream_t) of the device with this index, on which all pointers are.
// Throws std::invalid_argument for another type, std::runtime_error when a launch fails.
void sum_of_squares_cuda(const void* data, NumberType type, const std::int64_t* tiles, std::int64_t num_tiles,
                         double* scratch, int device, void* stream);

}  // namespace megatron
