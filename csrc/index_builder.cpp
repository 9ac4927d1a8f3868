#include "index_builder.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace megatron {

template <typename Document, typename Boundary>
void build_sample_index(const std::int32_t* lengths, std::int64_t num_sequences, const Document* documents,
                        std::int64_t num_documents, std::int64_t sequence_length, std::int64_t extra_tokens,
                        std::int64_t total_tokens, std::int64_t num_samples, Boundary* boundaries) {
  boundaries[0] = 0;
  boundaries[1] = 0;
  std::int64_t sample = 1;
  std::int64_t document_start = 0;  // tokens of the stream before the current document
  const std::int64_t last_boundary = total_tokens - extra_tokens;
  for (std::int64_t position = 0; position < num_documents && sample <= num_samples; ++position) {
    const auto document = static_cast<std::int64_t>(documents[position]);
    if (document < 0 || document >= num_sequences) {
      throw std::out_of_range("document " + std::to_string(document) + " of a file with " +
                              std::to_string(num_sequences) + " sequences");
    }
    const std::int64_t document_end = document_start + lengths[document];
    while (sample <= num_samples) {
      const std::int64_t boundary = std::min(sample * sequence_length, last_boundary);
      // The sample that ends here has consumed the tokens before boundary + extra_tokens; its last one lies in this
      // document or in a later one.
      if (boundary + extra_tokens > document_end) break;
      boundaries[2 * sample] = static_cast<Boundary>(position);
      boundaries[2 * sample + 1] = static_cast<Boundary>(boundary - document_start);
      ++sample;
    }
    document_start = document_end;
  }
  if (sample <= num_samples) {
    throw std::invalid_argument("the documents hold " + std::to_string(document_start) + " tokens, which end before sample " +
                                std::to_string(sample) + " of " + std::to_string(num_samples));
  }
}

template void build_sample_index(const std::int32_t*, std::int64_t, const std::int32_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int32_t*);
template void build_sample_index(const std::int32_t*, std::int64_t, const std::int32_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int64_t*);
template void build_sample_index(const std::int32_t*, std::int64_t, const std::int64_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int32_t*);
template void build_sample_index(const std::int32_t*, std::int64_t, const std::int64_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int64_t*);

namespace {

// How far the dataset is behind its share when sample k is drawn. Sample 0 counts as 1, as in Megatron-LM, so that the
// largest weight comes first.
double shortfall(double weight, std::int64_t sample, double drawn) {
  return weight * static_cast<double>(std::max<std::int64_t>(sample, 1)) - drawn;
}

}  // namespace

void build_blend_index(const double* weights, std::int64_t num_datasets, std::int64_t size,
                       std::int16_t* dataset_index, std::int64_t* dataset_sample_index) {
  std::vector<double> counts(static_cast<std::size_t>(num_datasets), 0.0);  // whole numbers, exact to 2**53
  double* drawn = counts.data();
  for (std::int64_t sample = 0; sample < size; ++sample) {
    std::int64_t chosen = 0;
    double largest = shortfall(weights[0], sample, drawn[0]);
    for (std::int64_t dataset = 1; dataset < num_datasets; ++dataset) {
      // Selections, not a branch: which dataset is next can not be predicted.
      const double behind = shortfall(weights[dataset], sample, drawn[dataset]);
      chosen = behind > largest ? dataset : chosen;
      largest = behind > largest ? behind : largest;
    }
    dataset_index[sample] = static_cast<std::int16_t>(chosen);
    dataset_sample_index[sample] = static_cast<std::int64_t>(drawn[chosen]);
    drawn[chosen] += 1.0;
  }
}

void build_exhaustive_blend_index(const std::int64_t* sizes, std::int64_t num_datasets, std::int16_t* dataset_index,
                                  std::int64_t* dataset_sample_index) {
  const std::int64_t size = std::accumulate(sizes, sizes + num_datasets, std::int64_t{0});
  std::vector<double> counts(static_cast<std::size_t>(num_datasets), 0.0);
  double* drawn = counts.data();
  std::vector<std::int64_t> unspent;
  for (std::int64_t dataset = 0; dataset < num_datasets; ++dataset) {
    if (sizes[dataset] > 0) unspent.push_back(dataset);
  }
  for (std::int64_t sample = 0; sample < size; ++sample) {
    auto chosen = unspent.begin();
    double largest = std::numeric_limits<double>::lowest();
    for (auto candidate = unspent.begin(); candidate != unspent.end(); ++candidate) {
      const double weight = static_cast<double>(sizes[*candidate]) / static_cast<double>(size);
      const double behind = shortfall(weight, sample, drawn[*candidate]);
      if (behind > largest) {
        largest = behind;
        chosen = candidate;
      }
    }
    const std::int64_t dataset = *chosen;
    dataset_index[sample] = static_cast<std::int16_t>(dataset);
    dataset_sample_index[sample] = static_cast<std::int64_t>(drawn[dataset]);
    drawn[dataset] += 1.0;
    if (dataset_sample_index[sample] + 1 == sizes[dataset]) unspent.erase(chosen);
  }
}

}  // namespace megatron
