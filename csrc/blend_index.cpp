// Note [Drawing a blend in pieces]
// Which dataset is furthest behind depends on all samples before, so that the samples of a blend seem to need drawing one
// after the other. But a walk that starts from other numbers drawn soon draws the same samples: a dataset that is one too
// far ahead is left out once, and one too far behind is taken once more. So the blend is cut into chunks, and each is
// walked from a guess, some samples before its start, many chunks at a time: one in each lane of a vector, groups of them
// on several threads. Nothing is believed: where a walk came to the first sample of its chunk with other numbers than the
// chunk before ended with, it is walked again from there, until both agree. The result is that of a single walk.
#include "blend_index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "instruction_set.h"
#include "numbers.h"
#include "parallel.h"

namespace megatron {

namespace {

constexpr std::int64_t kLanes = 16;
// 64 run-ups, so that little is walked twice; as many pages as lanes are written to at a time. Were it a power of two,
// the lines that lanes write to side by side would meet in one set of the caches. 160 samples more move those of each
// lane on by 5 sets in one index and by 20 in the other, of 64, so that the lanes of an index are in 16 sets.
constexpr std::int64_t kChunk = (1 << 16) + 160;
constexpr std::int64_t kShare = 64;         // samples of a chunk for each dataset, at least: its numbers take room, too
constexpr std::int64_t kRunUp = 1 << 10;    // samples walked before a chunk

struct Blend {
  const double* weights;
  std::int64_t num_datasets;
  std::int16_t* dataset_index;
  std::int64_t* dataset_sample_index;

  // How far the dataset is behind its share when a sample is drawn. Sample 0 counts as 1, as in Megatron-LM, so that the
  // largest weight comes first.
  double shortfall(std::int64_t dataset, std::int64_t sample, const double* drawn) const {
    return weights[dataset] * static_cast<double>(std::max<std::int64_t>(sample, 1)) - drawn[dataset];
  }

  std::int64_t furthest_behind(std::int64_t sample, const double* drawn) const {
    std::int64_t chosen = 0;
    double largest = shortfall(0, sample, drawn);
    for (std::int64_t dataset = 1; dataset < num_datasets; ++dataset) {
      // Selections, not a branch: which dataset is next can not be predicted.
      const double behind = shortfall(dataset, sample, drawn);
      chosen = behind > largest ? dataset : chosen;
      largest = behind > largest ? behind : largest;
    }
    return chosen;
  }

  void draw(std::int64_t dataset, std::int64_t sample, double* drawn) const {
    dataset_index[sample] = static_cast<std::int16_t>(dataset);
    dataset_sample_index[sample] = static_cast<std::int64_t>(drawn[dataset]);
    drawn[dataset] += 1.0;
  }
};

// What a walk may have drawn before `sample`: the whole part of each share, and what is left to those furthest behind.
void guess(const Blend& blend, std::int64_t sample, double* drawn) {
  double total = 0.0;
  for (std::int64_t dataset = 0; dataset < blend.num_datasets; ++dataset) {
    drawn[dataset] = std::floor(blend.weights[dataset] * static_cast<double>(sample));
    total += drawn[dataset];
  }
  for (; total < static_cast<double>(sample); total += 1.0) drawn[blend.furthest_behind(sample, drawn)] += 1.0;
}

// kLanes chunks of one length, next to each other.
//
// drawn            [num_datasets][kLanes] numbers drawn before the run-up; out: at the end of each chunk
// drawn_at_start   [num_datasets][kLanes] out: at the first sample of each chunk
struct Group {
  std::int64_t first;
  std::int64_t chunk;
  std::int64_t run_up;
  double* drawn;
  double* drawn_at_start;
};

template <int width>
MEGATRON_INLINE void walk_lanes(const Blend blend, const Group group) {  // copies, which no store can change
  typedef double Doubles __attribute__((vector_size(width * sizeof(double))));
  constexpr int kVectors = static_cast<int>(kLanes) / width;
  Doubles firsts[kVectors];
  Doubles samples[kVectors];
  Doubles chosen[kVectors];
  Doubles counts[kVectors];
  Doubles largest[kVectors];
  double lanes[kLanes];
  double count_lanes[kLanes];
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = static_cast<double>(group.first + lane * group.chunk);
  }
  memcpy(firsts, lanes, sizeof lanes);
  for (std::int64_t step = -group.run_up; step < group.chunk; ++step) {
    if (step == 0) {
      memcpy(group.drawn_at_start, group.drawn,
             static_cast<std::size_t>(blend.num_datasets * kLanes) * sizeof(double));
    }
    for (int vector = 0; vector < kVectors; ++vector) {
      const Doubles sample = firsts[vector] + static_cast<double>(step);
      samples[vector] = sample < 1.0 ? Doubles{} + 1.0 : sample;
      largest[vector] = Doubles{} - std::numeric_limits<double>::infinity();
      chosen[vector] = counts[vector] = Doubles{};
    }
    double* drawn = group.drawn;
    for (std::int64_t dataset = 0; dataset < blend.num_datasets; ++dataset, drawn += kLanes) {
      for (int vector = 0; vector < kVectors; ++vector) {
        Doubles before;
        memcpy(&before, drawn + vector * width, sizeof before);
        const Doubles behind = blend.weights[dataset] * samples[vector] - before;
        const auto further = behind > largest[vector];
        largest[vector] = further ? behind : largest[vector];
        counts[vector] = further ? before : counts[vector];
        chosen[vector] = further ? Doubles{} + static_cast<double>(dataset) : chosen[vector];
      }
    }
    drawn = group.drawn;
    for (std::int64_t dataset = 0; dataset < blend.num_datasets; ++dataset, drawn += kLanes) {
      for (int vector = 0; vector < kVectors; ++vector) {
        Doubles before;
        memcpy(&before, drawn + vector * width, sizeof before);
        before += chosen[vector] == static_cast<double>(dataset) ? Doubles{} + 1.0 : Doubles{};
        memcpy(drawn + vector * width, &before, sizeof before);
      }
    }
    if (step < 0) continue;
    memcpy(lanes, chosen, sizeof lanes);
    memcpy(count_lanes, counts, sizeof count_lanes);
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const std::int64_t sample = group.first + lane * group.chunk + step;
      blend.dataset_index[sample] = static_cast<std::int16_t>(lanes[lane]);
      blend.dataset_sample_index[sample] = static_cast<std::int64_t>(count_lanes[lane]);
    }
  }
}

using WalkLanes = void (*)(const Blend&, const Group&);

void walk_lanes_generic(const Blend& blend, const Group& group) { walk_lanes<2>(blend, group); }

MEGATRON_TARGET_AVX2 void walk_lanes_avx2(const Blend& blend, const Group& group) { walk_lanes<4>(blend, group); }

MEGATRON_TARGET_AVX512 void walk_lanes_avx512(const Blend& blend, const Group& group) { walk_lanes<8>(blend, group); }

WalkLanes walk_lanes_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return walk_lanes_avx512;
    case InstructionSet::kAvx2:
      return walk_lanes_avx2;
    default:
      return walk_lanes_generic;
  }
}

// Go on from the true numbers until those of the walk from a guess are the same; returns whether they became so.
bool correct(const Blend& blend, std::int64_t begin, std::int64_t end, double* drawn, double* guessed) {
  const auto size = static_cast<std::size_t>(blend.num_datasets) * sizeof(double);
  for (std::int64_t sample = begin; sample < end; ++sample) {
    if (memcmp(drawn, guessed, size) == 0) return true;
    guessed[blend.dataset_index[sample]] += 1.0;
    blend.draw(blend.furthest_behind(sample, drawn), sample, drawn);
  }
  return memcmp(drawn, guessed, size) == 0;
}

}  // namespace

void build_blend_index(const double* weights, std::int64_t num_datasets, std::int64_t size, const BlendPlan& plan,
                       std::int16_t* dataset_index, std::int64_t* dataset_sample_index) {
  const WalkLanes walk = walk_lanes_for(megatron::instruction_set(plan.instruction_set));
  const Blend blend{weights, num_datasets, dataset_index, dataset_sample_index};
  const std::int64_t chunk = plan.chunk > 0 ? plan.chunk : std::max(kChunk, kShare * num_datasets);
  const std::int64_t run_up = std::min(kRunUp, chunk);
  const std::int64_t in_groups = std::max<std::int64_t>(size - run_up, 0) / (kLanes * chunk);
  const auto numbers = static_cast<std::size_t>(num_datasets * kLanes);
  std::vector<double> starts(static_cast<std::size_t>(in_groups) * numbers);
  std::vector<double> ends(starts.size());
  std::vector<double> guesses(static_cast<std::size_t>(in_groups * num_datasets));  // of one lane of each group
  for_each_part(in_groups, 1, plan.threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t number = begin; number < end; ++number) {
      double* guessed = guesses.data() + number * num_datasets;
      const auto place = static_cast<std::size_t>(number) * numbers;
      const Group group{run_up + number * kLanes * chunk, chunk, run_up, ends.data() + place, starts.data() + place};
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        guess(blend, group.first + lane * chunk - run_up, guessed);
        for (std::int64_t dataset = 0; dataset < num_datasets; ++dataset) {
          group.drawn[dataset * kLanes + lane] = guessed[dataset];
        }
      }
      walk(blend, group);
    }
  });
  std::vector<double> drawn(static_cast<std::size_t>(num_datasets), 0.0);
  std::vector<double> guessed(drawn.size());
  const auto of_lane = [num_datasets](const double* group, std::int64_t lane, std::vector<double>& numbers_of_lane) {
    for (std::int64_t dataset = 0; dataset < num_datasets; ++dataset) {
      numbers_of_lane[static_cast<std::size_t>(dataset)] = group[dataset * kLanes + lane];
    }
  };
  const auto draw = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t sample = begin; sample < end; ++sample) {
      blend.draw(blend.furthest_behind(sample, drawn.data()), sample, drawn.data());
    }
  };
  draw(0, std::min(run_up, size));
  for (std::int64_t number = 0; number < in_groups * kLanes; ++number) {
    const auto place = static_cast<std::size_t>(number / kLanes) * numbers;
    const std::int64_t begin = run_up + number * chunk;
    of_lane(starts.data() + place, number % kLanes, guessed);
    if (correct(blend, begin, begin + chunk, drawn.data(), guessed.data())) {
      of_lane(ends.data() + place, number % kLanes, drawn);
    }
  }
  draw(std::min(size, run_up + in_groups * kLanes * chunk), size);
}

void build_exhaustive_blend_index(const std::int64_t* sizes, std::int64_t num_datasets, const BlendPlan& plan,
                                  std::int16_t* dataset_index, std::int64_t* dataset_sample_index) {
  const std::int64_t size = std::accumulate(sizes, sizes + num_datasets, std::int64_t{0});
  std::vector<double> weights(static_cast<std::size_t>(num_datasets));
  for (std::int64_t dataset = 0; dataset < num_datasets; ++dataset) {
    weights[static_cast<std::size_t>(dataset)] = static_cast<double>(sizes[dataset]) / static_cast<double>(size);
  }
  // Until the first dataset is spent nothing is left out. After it one sample is drawn at a time.
  build_blend_index(weights.data(), num_datasets, size, plan, dataset_index, dataset_sample_index);
  std::int64_t sample = 0;
  while (sample < size && dataset_sample_index[sample] + 1 < sizes[dataset_index[sample]]) ++sample;
  std::vector<double> drawn(static_cast<std::size_t>(num_datasets), 0.0);
  for (std::int64_t before = 0; before < std::min(sample + 1, size); ++before) {
    drawn[static_cast<std::size_t>(dataset_index[before])] += 1.0;
  }
  const Blend blend{weights.data(), num_datasets, dataset_index, dataset_sample_index};
  std::vector<std::int64_t> unspent;
  for (std::int64_t dataset = 0; dataset < num_datasets; ++dataset) {
    if (drawn[static_cast<std::size_t>(dataset)] < static_cast<double>(sizes[dataset])) unspent.push_back(dataset);
  }
  for (++sample; sample < size; ++sample) {
    const auto chosen = std::max_element(unspent.begin(), unspent.end(), [&](std::int64_t a, std::int64_t b) {
      return blend.shortfall(a, sample, drawn.data()) < blend.shortfall(b, sample, drawn.data());
    });
    const std::int64_t dataset = *chosen;
    blend.draw(dataset, sample, drawn.data());
    if (dataset_sample_index[sample] + 1 == sizes[dataset]) unspent.erase(chosen);
  }
}

}  // namespace megatron
