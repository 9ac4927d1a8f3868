#include "bert_mapping.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>

namespace megatron {

namespace {

constexpr std::int32_t kLongestSentence = 512;  // a document with a longer one is passed over

bool has_long_sentence(const std::int32_t* lengths, std::int64_t first, std::int64_t end) {
  return std::any_of(lengths + first, lengths + end, [](std::int32_t length) { return length > kLongestSentence; });
}

// Calls sample(first, end, target) for the samples of all epochs in the order of the file; their number.
template <typename Sample>
std::int64_t for_each_sample(const Sentences& of, const Sample& sample) {
  std::mt19937 random(of.seed);
  const auto draw_target = [&]() -> std::int64_t {
    if (of.short_every == 0) return of.sequence_length;
    const auto number = static_cast<std::int64_t>(random());
    return number % of.short_every == 0 ? 2 + number % (of.sequence_length - 1) : of.sequence_length;
  };
  std::int64_t count = 0;
  while (count < of.requested) {
    const std::int64_t before = count;
    for (std::int64_t document = 0; document < of.num_documents; ++document) {
      std::int64_t first = of.documents[document];
      const std::int64_t end = of.documents[document + 1];
      if (first < 0 || end < first || end > of.num_sentences) {
        throw std::out_of_range("sentences " + std::to_string(first) + " to " + std::to_string(end) + " of a file with " +
                                std::to_string(of.num_sentences));
      }
      if (end - first < of.least_sentences) continue;
      if (end - first > 1 && has_long_sentence(of.lengths, first, end)) continue;
      std::int64_t target = draw_target();
      std::int64_t tokens = 0;
      for (std::int64_t next = first; next < end;) {
        tokens += of.lengths[next++];
        // The last sentence of a document is not left to a sample of its own.
        const bool full = tokens >= target && end - next > 1 && next - first >= of.least_sentences;
        if (!full && next < end) continue;
        sample(first, next, target);
        ++count;
        first = next;
        tokens = 0;
        target = draw_target();
      }
    }
    if (count == before) break;  // nor has another epoch one
  }
  return count;
}

}  // namespace

std::int64_t count_bert_samples(const Sentences& sentences) {
  return for_each_sample(sentences, [](std::int64_t, std::int64_t, std::int64_t) {});
}

template <typename Row>
void build_bert_mapping(const Sentences& sentences, std::int64_t num_samples, Row* rows) {
  Row* next = rows;
  for_each_sample(sentences, [&next](std::int64_t first, std::int64_t end, std::int64_t target) {
    *next++ = static_cast<Row>(first);
    *next++ = static_cast<Row>(end);
    *next++ = static_cast<Row>(target);
  });
  // 64 bits, as there may be more samples than 32 bits can choose from.
  std::mt19937_64 random(std::uint64_t{sentences.seed} + 1);
  for (std::int64_t sample = num_samples - 1; sample > 0; --sample) {
    const auto other = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(sample + 1));
    std::swap_ranges(rows + 3 * sample, rows + 3 * sample + 3, rows + 3 * other);
  }
}

template void build_bert_mapping(const Sentences&, std::int64_t, std::uint32_t*);
template void build_bert_mapping(const Sentences&, std::int64_t, std::uint64_t*);

}  // namespace megatron
