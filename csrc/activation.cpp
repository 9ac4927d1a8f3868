#include "activation.h"

#include "for_each_row.h"

namespace megatron {

namespace {

template <bool fused>
struct Power {
  template <typename Real>
  MEGATRON_INLINE Real operator()(Real x) const {
    return exponential<fused>(x);
  }
};

template <Function function>
struct ForwardRows {
  const Activation& activation;
  void* output;

  template <bool fused, typename Number>
  MEGATRON_INLINE void row(std::int64_t row) const {
    using Real = RealOf<Number>;
    constexpr std::int64_t inputs = function == Function::kSwiGlu ? 2 : 1;
    const std::int64_t width = activation.width;
    const Number* __restrict x = static_cast<const Number*>(activation.input) + row * inputs * width;
    Number* __restrict y = static_cast<Number*>(output) + row * width;
    constexpr Power<fused> power;
    for (std::int64_t i = 0; i < width; ++i) {
      const Real value = read_number(x[i]);
      if constexpr (function == Function::kSwiGlu) {
        y[i] = written_number<Number>(value * sigmoid(value, power) * read_number(x[width + i]));
      } else {
        y[i] = written_number<Number>(gelu(value, power));
      }
    }
  }
};

template <Function function>
struct BackwardRows {
  const Activation& activation;
  const void* gradient;
  void* input_gradient;

  template <bool fused, typename Number>
  MEGATRON_INLINE void row(std::int64_t row) const {
    using Real = RealOf<Number>;
    constexpr std::int64_t inputs = function == Function::kSwiGlu ? 2 : 1;
    const std::int64_t width = activation.width;
    const Number* __restrict x = static_cast<const Number*>(activation.input) + row * inputs * width;
    const Number* __restrict dy = static_cast<const Number*>(gradient) + row * width;
    Number* __restrict dx = static_cast<Number*>(input_gradient) + row * inputs * width;
    constexpr Power<fused> power;
    for (std::int64_t i = 0; i < width; ++i) {
      const Real value = read_number(x[i]);
      const Real passed = read_number(dy[i]);
      if constexpr (function == Function::kSwiGlu) {
        const GatedSlopes<Real> slopes = swiglu_slopes(value, read_number(x[width + i]), power);
        dx[i] = written_number<Number>(passed * slopes.gate);
        dx[width + i] = written_number<Number>(passed * slopes.up);
      } else {
        dx[i] = written_number<Number>(passed * gelu_slope(value, power));
      }
    }
  }
};

}  // namespace

void activation_cpu(const Activation& activation, void* output, std::int64_t threads,
                    const std::string& instruction_set) {
  const auto run = [&](const auto& rows) {
    for_each_row(rows, activation.type, activation.rows, activation.width, threads, instruction_set);
  };
  if (activation.function == Function::kSwiGlu) {
    run(ForwardRows<Function::kSwiGlu>{activation, output});
  } else {
    run(ForwardRows<Function::kGelu>{activation, output});
  }
}

void activation_gradient_cpu(const Activation& activation, const void* gradient, void* input_gradient,
                             std::int64_t threads, const std::string& instruction_set) {
  const auto run = [&](const auto& rows) {
    for_each_row(rows, activation.type, activation.rows, activation.width, threads, instruction_set);
  };
  if (activation.function == Function::kSwiGlu) {
    run(BackwardRows<Function::kSwiGlu>{activation, gradient, input_gradient});
  } else {
    run(BackwardRows<Function::kGelu>{activation, gradient, input_gradient});
  }
}

}  // namespace megatron
