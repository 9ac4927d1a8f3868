#include "cross_entropy.h"

#include <algorithm>

#include "for_each_row.h"

namespace megatron {

namespace {

// So many logits of a row are read at a time, as Real in scratch in the first cache: each is read from memory once.
constexpr std::int64_t kBlock = 512;
static_assert(kBlock % kRowLanes == 0, "a block fills its lanes");

template <typename Real>
constexpr Real kNone = -std::numeric_limits<Real>::infinity();

template <typename Real>
MEGATRON_INLINE Real larger(Real candidate, Real value) {
  return candidate > value ? candidate : value;  // never the candidate that is not a number
}

// Both over a whole block of scratch, the rest of which is filled with what changes nothing.
template <typename Real>
MEGATRON_INLINE Real block_maximum(const Real* block) {
  Real lanes[kRowLanes];
  for (std::int64_t lane = 0; lane < kRowLanes; ++lane) lanes[lane] = kNone<Real>;
  for (std::int64_t start = 0; start < kBlock; start += kRowLanes) {
    for (std::int64_t lane = 0; lane < kRowLanes; ++lane) lanes[lane] = larger(block[start + lane], lanes[lane]);
  }
  for (std::int64_t half = kRowLanes / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) lanes[lane] = larger(lanes[lane + half], lanes[lane]);
  }
  return lanes[0];
}

template <typename Real>
MEGATRON_INLINE Real block_sum(const Real* block) {
  Real lanes[kRowLanes] = {};
  for (std::int64_t start = 0; start < kBlock; start += kRowLanes) {
    for (std::int64_t lane = 0; lane < kRowLanes; ++lane) lanes[lane] += block[start + lane];
  }
  return sum_of_lanes(lanes);
}

template <bool fused, typename Number>
MEGATRON_INLINE void row_statistics(const Logits& logits, const LogitStatistics& statistics, std::int64_t row) {
  using Real = RealOf<Number>;
  const Number* x = static_cast<const Number*>(logits.data) + row * logits.width;
  alignas(64) Real block[kBlock];
  Real maximum = kNone<Real>;
  double sum = 0.0, logit_sum = 0.0;
  for (std::int64_t start = 0; start < logits.valid; start += kBlock) {
    const std::int64_t count = std::min(kBlock, logits.valid - start);
    for (std::int64_t i = 0; i < count; ++i) block[i] = read_number(x[start + i]);
    if (statistics.logit_sum != nullptr) {
      for (std::int64_t i = count; i < kBlock; ++i) block[i] = Real(0);
      logit_sum += static_cast<double>(block_sum(block));
    }
    for (std::int64_t i = count; i < kBlock; ++i) block[i] = kNone<Real>;
    const Real larger_maximum = larger(block_maximum(block), maximum);
    // What is not a number shows in the sum also where everything else is -infinity.
    const Real shift = larger_maximum == kNone<Real> ? Real(0) : larger_maximum;
    for (std::int64_t i = 0; i < kBlock; ++i) block[i] = exponential<fused>(block[i] - shift);
    if (larger_maximum != maximum) sum *= static_cast<double>(exponential<fused>(maximum - larger_maximum));
    sum += static_cast<double>(block_sum(block));
    maximum = larger_maximum;
  }
  const std::int64_t target = logits.targets[row];
  const bool is_here = target >= 0 && target < logits.valid;
  static_cast<Real*>(statistics.maximum)[row] = maximum;
  static_cast<Real*>(statistics.sum)[row] = static_cast<Real>(sum);
  static_cast<Real*>(statistics.target_logit)[row] = is_here ? read_number(x[target]) : Real(0);
  if (statistics.logit_sum != nullptr) static_cast<Real*>(statistics.logit_sum)[row] = static_cast<Real>(logit_sum);
}

template <bool fused, typename Number>
MEGATRON_INLINE void row_gradient(const Logits& logits, const LogitGradient& out, std::int64_t row) {
  using Real = RealOf<Number>;
  const Number* x = static_cast<const Number*>(logits.data) + row * logits.width;
  Number* gradient = static_cast<Number*>(out.gradient) + row * logits.width;
  const Real maximum = static_cast<const Real*>(out.maximum)[row];
  const Real scale = static_cast<const Real*>(out.scale)[row];
  const Real inverse_sum = Real(1) / static_cast<const Real*>(out.sum)[row];
  const Real factor = inverse_sum * scale;
  const Real on_each = static_cast<Real>(out.on_each) * scale;
  const std::int64_t target = logits.targets[row];
  const bool is_here = target >= 0 && target < logits.valid;
  const Real target_logit = is_here ? read_number(x[target]) : Real(0);
  alignas(64) Real block[kBlock];
  for (std::int64_t start = 0; start < logits.valid; start += kBlock) {
    const std::int64_t count = std::min(kBlock, logits.valid - start);
    for (std::int64_t i = 0; i < count; ++i) block[i] = read_number(x[start + i]);
    for (std::int64_t i = 0; i < count; ++i) block[i] = exponential<fused>(block[i] - maximum) * factor - on_each;
    for (std::int64_t i = 0; i < count; ++i) gradient[start + i] = written_number<Number>(block[i]);
  }
  std::fill(gradient + logits.valid, gradient + logits.width, Number{});
  if (!is_here) return;
  const Real probability = exponential<fused>(target_logit - maximum) * inverse_sum;
  const Real on_target = static_cast<Real>(out.on_target);
  gradient[target] = written_number<Number>((probability - on_target) * scale - on_each);
}

struct StatisticsRows {
  const Logits& logits;
  const LogitStatistics& statistics;

  template <bool fused, typename Number>
  MEGATRON_INLINE void row(std::int64_t row) const {
    row_statistics<fused, Number>(logits, statistics, row);
  }
};

struct GradientRows {
  const Logits& logits;
  const LogitGradient& gradient;

  template <bool fused, typename Number>
  MEGATRON_INLINE void row(std::int64_t row) const {
    row_gradient<fused, Number>(logits, gradient, row);
  }
};

}  // namespace

void logit_statistics_cpu(const Logits& logits, const LogitStatistics& statistics, std::int64_t threads,
                          const std::string& instruction_set) {
  for_each_row(StatisticsRows{logits, statistics}, logits.type, logits.rows, logits.width, threads, instruction_set);
}

void logit_gradient_cpu(const Logits& logits, const LogitGradient& gradient, std::int64_t threads,
                        const std::string& instruction_set) {
  for_each_row(GradientRows{logits, gradient}, logits.type, logits.rows, logits.width, threads, instruction_set);
}

}  // namespace megatron
