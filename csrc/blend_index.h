// Which dataset of a blend each training sample comes from. Plain pointers and sizes; see blend_index.cpp.
#pragma once

#include <cstdint>
#include <string>

namespace megatron {

// How a blend is shared out. The numbers are the same for any.
//
// chunk            samples that are drawn in one run; 0 chooses
// instruction_set  one of instruction_sets(), or "best"
struct BlendPlan {
  std::int64_t threads;
  std::int64_t chunk;
  std::string instruction_set;
};

// Draw `size` samples from several datasets so that the share of each stays as near to its weight as it can be at every
// point: sample k comes from the dataset that is furthest behind, the lowest of equals.
//
// weights[num_datasets]         positive, of sum 1
// dataset_index[size]           out: where each sample comes from
// dataset_sample_index[size]    out: how many samples before it come from there
// Throws std::invalid_argument for an instruction set that this processor does not have.
void build_blend_index(const double* weights, std::int64_t num_datasets, std::int64_t size, const BlendPlan& plan,
                       std::int16_t* dataset_index, std::int64_t* dataset_sample_index);

// The same with weights proportional to `sizes`, leaving a dataset out once it is spent, until all are.
void build_exhaustive_blend_index(const std::int64_t* sizes, std::int64_t num_datasets, const BlendPlan& plan,
                                  std::int16_t* dataset_index, std::int64_t* dataset_sample_index);

}  // namespace megatron
