// What operators on activations compute with, for CPUs and GPUs: a number of any type is read as the type Real that it
// is computed in (float64 for float64, else float32), and rounded once when it is written.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "numbers.h"

namespace megatron {

// float64 for float64 numbers, float32 for all others.
template <typename Number>
using RealOf = std::conditional_t<std::is_same_v<Number, double>, double, float>;

template <typename Number>
MEGATRON_INLINE RealOf<Number> read_number(Number value) {
  if constexpr (std::is_same_v<Number, Float16>) {
    const std::uint32_t bits = value.bits;
    // Moved to the place of a float's exponent and fraction, and scaled by 2**112: subnormal numbers too.
    const float size = float_of((bits & 0x7fffu) << 13) * 0x1p112f;
    const std::uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return float_of(bits_of(size) | special | (bits & 0x8000u) << 16);
  } else {
    return widened<RealOf<Number>>(value);
  }
}

template <typename Number>
MEGATRON_INLINE Number written_number(RealOf<Number> value) {
  if constexpr (std::is_same_v<Number, double>) {
    return value;
  } else {
    return narrowed<Number>(value);
  }
}

// Calls body(number) with a number of the type, for the sake of its C++ type.
template <typename Body>
void with_number_of(NumberType type, const Body& body) {
  switch (type) {
    case NumberType::kFloat64:
      return body(double{});
    case NumberType::kBFloat16:
      return body(BFloat16{});
    case NumberType::kFloat16:
      return body(Float16{});
    default:
      return body(float{});
  }
}

#ifndef __CUDACC__

// Sums and maxima are taken in so many lanes, whatever the vectors: with the same bits.
constexpr std::int64_t kRowLanes = 32;

template <typename Real>
MEGATRON_INLINE Real sum_of_lanes(Real* lanes) {
  for (std::int64_t half = kRowLanes / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// a * b + c: rounded once where the instruction set has that (`fused`), else twice.
template <bool fused>
MEGATRON_INLINE float multiply_add(float a, float b, float c) {
  return fused ? __builtin_fmaf(a, b, c) : a * b + c;
}

template <bool fused>
MEGATRON_INLINE double multiply_add(double a, double b, double c) {
  return fused ? __builtin_fma(a, b, c) : a * b + c;
}

// e**x within 2 units in the last place, as loops that become vectors: 2**n * e**r with n the integer next to x / ln 2,
// e**r for |r| <= ln(2) / 2 by a polynomial whose largest relative error is least (Remez): 1.9e-9 and 3.1e-18.
// Zero where the result would be below the normal numbers, infinite from 2**127.5 and 2**1023.5.
template <bool fused>
MEGATRON_INLINE float exponential(float x) {
  constexpr float kRound = 0x1.8p23f;  // added, it leaves the integer part in the low bits
  const float shifted = multiply_add<fused>(x, 0x1.715476p0f, kRound);
  const float n = shifted - kRound;
  const float high = multiply_add<fused>(n, -0x1.62e4p-1f, x);  // exact: 15 bits times at most 8
  const float r = multiply_add<fused>(n, -0x1.7f7d1cf79abcap-20f, high);
  float power = 0.0013836835742475305589f;
  power = multiply_add<fused>(power, r, 0.0083748240505893823123f);
  power = multiply_add<fused>(power, r, 0.041668226189294490556f);
  power = multiply_add<fused>(power, r, 0.16666420072125316461f);
  power = multiply_add<fused>(power, r, 0.49999992075088730455f);
  power = multiply_add<fused>(power, r, 1.0000000363447210654f);
  power = multiply_add<fused>(power, r, 1.0000000005546077423f);
  const float result = power * float_of((bits_of(shifted) + 127u) << 23);
  const float bounded = x > 88.376f ? std::numeric_limits<float>::infinity() : result;
  return x < -87.336f ? 0.0f : bounded;
}

template <bool fused>
MEGATRON_INLINE double exponential(double x) {
  constexpr double kRound = 0x1.8p52;
  const double shifted = multiply_add<fused>(x, 0x1.71547652b82fep0, kRound);
  const double n = shifted - kRound;
  const double high = multiply_add<fused>(n, -0x1.62e42feep-1, x);
  const double r = multiply_add<fused>(n, -0x1.a39ef35793c76p-33, high);
  double power = 2.4994293345730463606e-8;
  power = multiply_add<fused>(power, r, 2.7632308224452544435e-7);
  power = multiply_add<fused>(power, r, 2.7557622652024488477e-6);
  power = multiply_add<fused>(power, r, 2.4801486481283498188e-5);
  power = multiply_add<fused>(power, r, 1.9841269432434438281e-4);
  power = multiply_add<fused>(power, r, 1.388888895126120425e-3);
  power = multiply_add<fused>(power, r, 8.3333333335594517973e-3);
  power = multiply_add<fused>(power, r, 4.1666666666492628989e-2);
  power = multiply_add<fused>(power, r, 0.16666666666666168167);
  power = multiply_add<fused>(power, r, 0.50000000000000177032);
  power = multiply_add<fused>(power, r, 1.0000000000000000304);
  power = multiply_add<fused>(power, r, 0.9999999999999999971);
  std::uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023u) << 52;
  double scale;
  memcpy(&scale, &bits, sizeof scale);
  const double result = power * scale;
  const double bounded = x > 709.43 ? std::numeric_limits<double>::infinity() : result;
  return x < -708.396 ? 0.0 : bounded;
}

#endif

}  // namespace megatron
