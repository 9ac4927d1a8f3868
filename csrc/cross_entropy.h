// Softmax cross entropy over a part of the columns of its logits: what a rank of a group, or a chunk of the vocabulary,
// has to know of its own columns, and their gradient. Plain pointers and sizes; see cross_entropy.cpp for CPUs,
// cross_entropy.cu for GPUs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "activation_math.h"

namespace megatron {

// logits   [rows][width] float64, float32, bfloat16 or float16, read as Real: float64 for float64, else float32
// valid    so many of the columns take part; the rest is padding
// targets  [rows] column of the target of each row, counted from the first of these: outside of [0, valid) it is none
//          of them
struct Logits {
  const void* data;
  NumberType type;
  std::int64_t rows, width, valid;
  const std::int64_t* targets;
};

// All [rows] Real, written.
// maximum        of the valid columns; -infinity without any. It leaves out what is not a number
// sum            of exp(x - maximum); 0 without any. It is not a number if a valid column is not
// target_logit   x of the target, 0 where it is none of the columns
// logit_sum      sum of the valid columns; null where nobody needs it
struct LogitStatistics {
  void *maximum, *sum, *target_logit, *logit_sum;
};

// The gradient of a row is scale * (exp(x - maximum) / sum - on_each - on_target at the target), zero in the padding.
// maximum, sum, scale  [rows] Real
// gradient             [rows][width] of the type of the logits; may be the logits themselves
struct LogitGradient {
  const void *maximum, *sum, *scale;
  double on_target, on_each;
  void* gradient;
};

// instruction_set  by name, see instruction_set.h. With "generic" operations round twice where the others have fused
//                  multiply-adds; neither threads nor the other sets change a bit.
void logit_statistics_cpu(const Logits& logits, const LogitStatistics& statistics, std::int64_t threads,
                          const std::string& instruction_set);
void logit_gradient_cpu(const Logits& logits, const LogitGradient& gradient, std::int64_t threads,
                        const std::string& instruction_set);

// Queued on a stream (cudaStream_t) of the device with this index, on which all pointers are.
// Throw std::runtime_error when the launch fails.
void logit_statistics_cuda(const Logits& logits, const LogitStatistics& statistics, int device, void* stream);
void logit_gradient_cuda(const Logits& logits, const LogitGradient& gradient, int device, void* stream);

}  // namespace megatron
