// Rows of an operator on activations: spread over threads, in the instruction set and the type that are asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "activation_math.h"
#include "instruction_set.h"
#include "parallel.h"

namespace megatron {

template <typename Rows>
using RunRows = void (*)(const Rows&, std::int64_t, std::int64_t);

template <typename Number, typename Rows>
void run_rows_generic(const Rows& rows, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) rows.template row<false, Number>(row);
}

template <typename Number, typename Rows>
MEGATRON_TARGET_AVX2 void run_rows_avx2(const Rows& rows, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) rows.template row<true, Number>(row);
}

template <typename Number, typename Rows>
MEGATRON_TARGET_AVX512 void run_rows_avx512(const Rows& rows, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) rows.template row<true, Number>(row);
}

template <typename Number, typename Rows>
RunRows<Rows> run_rows_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return run_rows_avx512<Number, Rows>;
    case InstructionSet::kAvx2:
      return run_rows_avx2<Number, Rows>;
    default:
      return run_rows_generic<Number, Rows>;
  }
}

// Calls rows.row<fused, Number>(row), inlined, for each row: `fused` as in multiply_add, Number of the type.
// width  elements of a row, of which a thread is not worth waking for a few
template <typename Rows>
void for_each_row(const Rows& rows, NumberType type, std::int64_t count, std::int64_t width, std::int64_t threads,
                  const std::string& instruction_set) {
  constexpr std::int64_t kGrain = 1 << 15;
  const InstructionSet set = megatron::instruction_set(instruction_set);
  RunRows<Rows> run = nullptr;
  with_number_of(type, [&](auto number) { run = run_rows_for<decltype(number), Rows>(set); });
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width));
  for_each_part(count, grain, threads, [&](std::int64_t begin, std::int64_t end) { run(rows, begin, end); });
}

}  // namespace megatron
