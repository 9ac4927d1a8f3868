#include "grad_norm.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "instruction_set.h"
#include "parallel.h"

namespace megatron {

namespace {

// `width` lanes of each kind of number, as one vector of the instruction set.
template <int width>
struct Vectors {
  typedef double Doubles __attribute__((vector_size(width * sizeof(double))));
  typedef float Floats __attribute__((vector_size(width * sizeof(float))));
  typedef std::uint32_t Words __attribute__((vector_size(width * sizeof(std::uint32_t))));
  typedef std::uint16_t HalfWords __attribute__((vector_size(width * sizeof(std::uint16_t))));
};

template <typename Vector>
MEGATRON_INLINE void load(const void* source, Vector& vector) {
  memcpy(&vector, source, sizeof vector);
}

template <int width>
MEGATRON_INLINE void load_lanes(const double* source, typename Vectors<width>::Doubles& lanes) {
  load(source, lanes);
}

template <int width>
MEGATRON_INLINE void load_lanes(const float* source, typename Vectors<width>::Doubles& lanes) {
  typename Vectors<width>::Floats floats;
  load(source, floats);
  lanes = __builtin_convertvector(floats, typename Vectors<width>::Doubles);
}

template <int width>
MEGATRON_INLINE void load_lanes(const BFloat16* source, typename Vectors<width>::Doubles& lanes) {
  typename Vectors<width>::HalfWords halves;
  load(source, halves);
  const typename Vectors<width>::Words words = __builtin_convertvector(halves, typename Vectors<width>::Words) << 16;
  typename Vectors<width>::Floats floats;
  load(&words, floats);
  lanes = __builtin_convertvector(floats, typename Vectors<width>::Doubles);
}

// Sum of the elements or of their squares.
template <int width, bool squared, typename Number>
MEGATRON_INLINE double tile_sum(const Number* elements, std::int64_t count) {
  constexpr int vectors = static_cast<int>(kLanes) / width;
  typename Vectors<width>::Doubles sums[vectors] = {};
  std::int64_t start = 0;
  for (; start + kLanes <= count; start += kLanes) {
    for (int vector = 0; vector < vectors; ++vector) {
      typename Vectors<width>::Doubles values;
      load_lanes<width>(elements + start + vector * width, values);
      sums[vector] += squared ? values * values : values;
    }
  }
  double lanes[kLanes];
  memcpy(lanes, sums, sizeof lanes);
  for (std::int64_t lane = 0; lane < count - start; ++lane) {
    const double value = widened<double>(elements[start + lane]);
    lanes[lane] += squared ? value * value : value;
  }
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

struct Task {
  const void* data;
  const std::int64_t* tiles;
  double* sums;
};

template <int width, typename Number>
MEGATRON_INLINE void sum_tiles(const Task& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t tile = begin; tile < end; ++tile) {
    const std::int64_t start = task.tiles[2 * tile];
    const std::int64_t stop = task.tiles[2 * tile + 1];
    task.sums[tile] = tile_sum<width, true>(static_cast<const Number*>(task.data) + start, stop - start);
  }
}

using SumTiles = void (*)(const Task&, std::int64_t, std::int64_t);

template <typename Number>
void sum_tiles_generic(const Task& task, std::int64_t begin, std::int64_t end) {
  sum_tiles<2, Number>(task, begin, end);
}

template <typename Number>
MEGATRON_TARGET_AVX2 void sum_tiles_avx2(const Task& task, std::int64_t begin, std::int64_t end) {
  sum_tiles<4, Number>(task, begin, end);
}

template <typename Number>
MEGATRON_TARGET_AVX512 void sum_tiles_avx512(const Task& task, std::int64_t begin, std::int64_t end) {
  sum_tiles<8, Number>(task, begin, end);
}

template <typename Number>
SumTiles sum_tiles_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return sum_tiles_avx512<Number>;
    case InstructionSet::kAvx2:
      return sum_tiles_avx2<Number>;
    default:
      return sum_tiles_generic<Number>;
  }
}

SumTiles sum_tiles_for(NumberType type, InstructionSet set) {
  switch (type) {
    case NumberType::kFloat64:
      return sum_tiles_for<double>(set);
    case NumberType::kFloat32:
      return sum_tiles_for<float>(set);
    case NumberType::kBFloat16:
      return sum_tiles_for<BFloat16>(set);
    default:
      throw std::invalid_argument("sum_of_squares takes float64, float32 and bfloat16");
  }
}

}  // namespace

double sum_of_squares_cpu(const void* data, NumberType type, const std::int64_t* tiles, std::int64_t num_tiles,
                          std::int64_t threads, const std::string& instruction_set) {
  const SumTiles sum = sum_tiles_for(type, megatron::instruction_set(instruction_set));
  if (num_tiles == 0) return 0.0;
  std::vector<double> sums(static_cast<std::size_t>(num_tiles));
  const Task task{data, tiles, sums.data()};
  for_each_part(num_tiles, 4, threads, [&](std::int64_t begin, std::int64_t end) { sum(task, begin, end); });
  for (std::int64_t count = num_tiles; count > 1;) {
    const std::int64_t groups = (count + kSumGroup - 1) / kSumGroup;
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t start = group * kSumGroup;
      sums[static_cast<std::size_t>(group)] =
          tile_sum<2, false>(sums.data() + start, std::min(kSumGroup, count - start));
    }
    count = groups;
  }
  return sums[0];
}

}  // namespace megatron
