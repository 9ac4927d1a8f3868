#include "fused_adam.h"

#include <algorithm>
#include <stdexcept>

#include "instruction_set.h"
#include "parallel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace megatron {

namespace {

// What is converted lies in scratch of one block at a time, in the first cache. Blocks are short, so that the processor
// reads the next one while it converts and writes this one.
constexpr std::int64_t kBlock = 128;
// So far ahead the arrays are asked for: the pass is some 8 % faster than with the processor's own guess.
constexpr std::int64_t kAhead = 2 * kBlock;
// A thread is not worth waking for less.
constexpr std::int64_t kGrain = 128 * kBlock;

struct Task {
  const AdamBuffers& buffers;
  const HyperSpans& spans;
  const AdamHyperParameters& hyper;
};

template <typename Number>
MEGATRON_INLINE Number* elements(const FlatArray& array, std::int64_t start) {
  return static_cast<Number*>(array.data) + start;
}

template <typename Number>
MEGATRON_INLINE void prefetch_elements(const Number* elements, std::int64_t count) {
  constexpr std::int64_t kLine = 64 / sizeof(Number);
  for (std::int64_t i = 0; i < count; i += kLine) __builtin_prefetch(elements + i);
}

template <typename Real>
MEGATRON_INLINE void prefetch(const FlatArray& array, std::int64_t start, std::int64_t count) {
  if (array.type == NumberType::kBFloat16) {
    prefetch_elements(elements<const BFloat16>(array, start), count);
  } else {
    prefetch_elements(elements<const Real>(array, start), count);
  }
}

// The block in the main precision: in place, or converted into scratch.
template <typename Real>
MEGATRON_INLINE Real* read_block(const FlatArray& array, std::int64_t start, std::int64_t count, Real* scratch) {
  if (array.type != NumberType::kBFloat16) return elements<Real>(array, start);
  const auto* source = elements<BFloat16>(array, start);
  for (std::int64_t i = 0; i < count; ++i) scratch[i] = widened<Real>(source[i]);
  return scratch;
}

// The same of the parameters, which may lie in halves.
template <typename Real>
MEGATRON_INLINE Real* read_parameters(const AdamBuffers& buffers, std::int64_t start, std::int64_t count,
                                      Real* scratch) {
  if (!buffers.in_halves()) return elements<Real>(buffers.parameter, start);
  const auto* uppers = elements<BFloat16>(buffers.parameter, start);
  const std::int16_t* lowers = buffers.remainder + start;
  for (std::int64_t i = 0; i < count; ++i) scratch[i] = joined(uppers[i], lowers[i]);
  return scratch;
}

template <typename Real>
MEGATRON_INLINE void write_halves(const Real* __restrict block, std::int64_t count, BFloat16* __restrict uppers,
                                  std::int16_t* __restrict lowers) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(block[i]);
    uppers[i] = upper_half(value);
    lowers[i] = lower_half(value);
  }
}

template <typename Number, typename Real>
MEGATRON_INLINE void narrow(const Real* __restrict source, std::int64_t count, Number* __restrict target) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = narrowed<Number>(static_cast<float>(source[i]));
}

template <typename Real>
MEGATRON_INLINE void write_back(const Real* block, std::int64_t count, const FlatArray& array, std::int64_t start) {
  if (array.type == NumberType::kBFloat16) narrow(block, count, elements<BFloat16>(array, start));
}

// Past the caches: the copy is not read again before the next forward pass, and a line that is written whole need not
// be read first.
template <typename Number>
MEGATRON_INLINE void stream(const Number* source, std::int64_t count, Number* target) {
  std::int64_t done = 0;
#if defined(__SSE2__)
  constexpr std::int64_t kWidth = sizeof(__m128i) / sizeof(Number);
  if (reinterpret_cast<std::uintptr_t>(target) % sizeof(__m128i) == 0) {
    for (; done + kWidth <= count; done += kWidth) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + done),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done)));
    }
  }
#endif
  for (; done < count; ++done) target[done] = source[done];
}

template <typename Real>
MEGATRON_INLINE void write_copy(const Real* block, std::int64_t count, const FlatArray& array, std::int64_t start) {
  if (array.type == NumberType::kBFloat16) {
    alignas(64) BFloat16 scratch[kBlock];
    for (std::int64_t i = 0; i < count; ++i) scratch[i] = upper_half(static_cast<float>(block[i]));
    stream(scratch, count, elements<BFloat16>(array, start));
  } else {
    alignas(64) Float16 scratch[kBlock];
    narrow(block, count, scratch);
    stream(scratch, count, elements<Float16>(array, start));
  }
}

template <typename Real>
MEGATRON_INLINE void update_elements(Real* __restrict parameter, const Real* __restrict gradient,
                                     Real* __restrict exp_avg, Real* __restrict exp_avg_sq, std::int64_t count,
                                     const AdamConstants<Real>& constants, const SpanConstants<Real>& span) {
  for (std::int64_t i = 0; i < count; ++i) {
    adam_element(parameter[i], gradient[i], exp_avg[i], exp_avg_sq[i], constants, span);
  }
}

template <typename Real>
MEGATRON_INLINE void update_part(const Task& task, std::int64_t begin, std::int64_t end) {
  alignas(64) Real parameters[kBlock], gradients[kBlock], exp_avgs[kBlock], exp_avg_sqs[kBlock];
  const AdamBuffers& buffers = task.buffers;
  const HyperSpans& spans = task.spans;
  const AdamConstants<Real> constants(task.hyper);
  std::int64_t span = std::upper_bound(spans.ends, spans.ends + spans.count, begin) - spans.ends;
  for (std::int64_t start = begin; start < end; start += kBlock) {
    const std::int64_t count = std::min(kBlock, end - start);
    const std::int64_t ahead = std::min(start + kAhead, end);
    const std::int64_t later = std::min(kBlock, end - ahead);
    prefetch<Real>(buffers.parameter, ahead, later);
    prefetch<Real>(buffers.gradient, ahead, later);
    prefetch<Real>(buffers.exp_avg, ahead, later);
    prefetch<Real>(buffers.exp_avg_sq, ahead, later);
    if (buffers.in_halves()) prefetch_elements(buffers.remainder + ahead, later);
    Real* parameter = read_parameters(buffers, start, count, parameters);
    const Real* gradient = read_block(buffers.gradient, start, count, gradients);
    Real* exp_avg = read_block(buffers.exp_avg, start, count, exp_avgs);
    Real* exp_avg_sq = read_block(buffers.exp_avg_sq, start, count, exp_avg_sqs);
    for (std::int64_t done = 0; done < count;) {
      while (spans.ends[span] <= start + done) ++span;
      const std::int64_t stop = std::min(count, spans.ends[span] - start);
      update_elements(parameter + done, gradient + done, exp_avg + done, exp_avg_sq + done, stop - done, constants,
                      span_constants(constants, spans.lr_multipliers[span], spans.weight_decay_multipliers[span]));
      done = stop;
    }
    write_back(exp_avg, count, buffers.exp_avg, start);
    write_back(exp_avg_sq, count, buffers.exp_avg_sq, start);
    if (buffers.in_halves()) {
      write_halves(parameter, count, elements<BFloat16>(buffers.parameter, start), buffers.remainder + start);
    } else if (buffers.low_precision.data != nullptr) {
      write_copy(parameter, count, buffers.low_precision, start);
    }
  }
#if defined(__SSE2__)
  _mm_sfence();  // what was streamed is seen before this thread is seen to be done
#endif
}

using UpdatePart = void (*)(const Task&, std::int64_t, std::int64_t);

template <typename Real>
void update_part_generic(const Task& task, std::int64_t begin, std::int64_t end) {
  update_part<Real>(task, begin, end);
}

template <typename Real>
MEGATRON_TARGET_AVX2 void update_part_avx2(const Task& task, std::int64_t begin, std::int64_t end) {
  update_part<Real>(task, begin, end);
}

template <typename Real>
MEGATRON_TARGET_AVX512 void update_part_avx512(const Task& task, std::int64_t begin, std::int64_t end) {
  update_part<Real>(task, begin, end);
}

template <typename Real>
UpdatePart update_part_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return update_part_avx512<Real>;
    case InstructionSet::kAvx2:
      return update_part_avx2<Real>;
    default:
      return update_part_generic<Real>;
  }
}

}  // namespace

void adamw_cpu(const AdamBuffers& buffers, const HyperSpans& spans, const AdamHyperParameters& hyper,
               std::int64_t threads, const std::string& instruction_set) {
  check_types(buffers);
  const InstructionSet set = megatron::instruction_set(instruction_set);
  const bool wide = buffers.parameter.type == NumberType::kFloat64;
  const UpdatePart update = wide ? update_part_for<double>(set) : update_part_for<float>(set);
  const Task task{buffers, spans, hyper};
  for_each_part(buffers.size, kGrain, threads,
                [&](std::int64_t begin, std::int64_t end) { update(task, begin, end); });
}

}  // namespace megatron
