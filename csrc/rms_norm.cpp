#include "rms_norm.h"

#include <algorithm>
#include <cmath>

#include "for_each_row.h"

namespace megatron {

namespace {

// The sum of value(i) for i < count, in lanes.
template <typename Real, typename Value>
MEGATRON_INLINE Real sum_over(std::int64_t count, const Value& value) {
  Real lanes[kRowLanes] = {};
  std::int64_t start = 0;
  for (; start + kRowLanes <= count; start += kRowLanes) {
    for (std::int64_t lane = 0; lane < kRowLanes; ++lane) lanes[lane] += value(start + lane);
  }
  for (std::int64_t lane = 0; lane < count - start; ++lane) lanes[lane] += value(start + lane);
  return sum_of_lanes(lanes);
}

template <typename Number>
MEGATRON_INLINE const Number* numbers(const void* data, std::int64_t start = 0) {
  return static_cast<const Number*>(data) + start;
}

struct ForwardRows {
  const RmsNorm& norm;
  void* output;
  double epsilon;

  template <bool fused, typename Number>
  MEGATRON_INLINE void row(std::int64_t row) const {
    using Real = RealOf<Number>;
    const std::int64_t width = norm.width;
    const Number* __restrict x = numbers<Number>(norm.input, row * width);
    const Number* __restrict weight = numbers<Number>(norm.weight);
    Number* __restrict y = static_cast<Number*>(output) + row * width;
    const auto square = [x](std::int64_t i) __attribute__((always_inline)) {
      const Real value = read_number(x[i]);
      return value * value;
    };
    const Real mean_square = sum_over<Real>(width, square) / static_cast<Real>(width);
    const Real inverse = Real(1) / std::sqrt(mean_square + static_cast<Real>(epsilon));
    static_cast<Real*>(norm.inverse)[row] = inverse;
    for (std::int64_t i = 0; i < width; ++i) {
      y[i] = written_number<Number>(read_number(x[i]) * inverse * read_number(weight[i]));
    }
  }
};

// A row here is a group of rows of the input.
struct BackwardGroups {
  const RmsNorm& norm;
  const RmsNormGradient& out;

  template <bool fused, typename Number>
  MEGATRON_INLINE void row(std::int64_t group) const {
    using Real = RealOf<Number>;
    const std::int64_t width = norm.width;
    const Number* __restrict weight = numbers<Number>(norm.weight);
    Real* __restrict weight_gradient = static_cast<Real*>(out.weight_gradients) + group * width;
    std::fill(weight_gradient, weight_gradient + width, Real(0));
    const std::int64_t end = std::min(norm.rows, (group + 1) * out.group);
    for (std::int64_t row = group * out.group; row < end; ++row) {
      const Number* __restrict x = numbers<Number>(norm.input, row * width);
      const Number* __restrict gradient = numbers<Number>(out.gradient, row * width);
      Number* __restrict input_gradient = static_cast<Number*>(out.input_gradient) + row * width;
      const Real inverse = static_cast<const Real*>(norm.inverse)[row];
      const auto along = [gradient, weight, x](std::int64_t i) __attribute__((always_inline)) {
        return read_number(gradient[i]) * read_number(weight[i]) * read_number(x[i]);
      };
      const Real slope = sum_over<Real>(width, along) * inverse / static_cast<Real>(width);
      for (std::int64_t i = 0; i < width; ++i) {
        const Real scaled = read_number(x[i]) * inverse;
        const Real value = read_number(gradient[i]);
        const Real rest = multiply_add<fused>(-scaled, slope, value * read_number(weight[i]));
        input_gradient[i] = written_number<Number>(rest * inverse);
        weight_gradient[i] = multiply_add<fused>(value, scaled, weight_gradient[i]);
      }
    }
  }
};

}  // namespace

void rms_norm_cpu(const RmsNorm& norm, void* output, double epsilon, std::int64_t threads,
                  const std::string& instruction_set) {
  for_each_row(ForwardRows{norm, output, epsilon}, norm.type, norm.rows, norm.width, threads, instruction_set);
}

void rms_norm_gradient_cpu(const RmsNorm& norm, const RmsNormGradient& out, std::int64_t threads,
                           const std::string& instruction_set) {
  const std::int64_t groups = (norm.rows + out.group - 1) / out.group;
  for_each_row(BackwardGroups{norm, out}, norm.type, groups, out.group * norm.width, threads, instruction_set);
}

}  // namespace megatron
