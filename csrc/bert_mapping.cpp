// Note [Walking sentences on several threads]
// A random number is drawn for each sample, so which one a document gets depends on all samples before it. One thread
// counts them. It leaves marks on its way, and from these several threads write the samples down.
#include "bert_mapping.h"

#include <algorithm>
#include <array>
#include <random>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace megatron {

namespace {

constexpr std::int32_t kLongestSentence = 512;  // a document with a longer one is passed over
constexpr std::size_t kAhead = 32;              // rows that are fetched while others are exchanged

void check(const Sentences& of) {
  for (std::int64_t document = 0; document < of.num_documents; ++document) {
    const std::int64_t first = of.documents[document];
    const std::int64_t end = of.documents[document + 1];
    if (first < 0 || end < first || end > of.num_sentences) {
      throw std::out_of_range("sentences " + std::to_string(first) + " to " + std::to_string(end) + " of a file with " +
                              std::to_string(of.num_sentences));
    }
  }
}

// Documents in turn, after the last one of an epoch the first again.
class Walk {
 public:
  Walk(const Sentences& of, const BertMark& from) : of_(of), at_(from), random_(of.seed) {
    random_.discard(static_cast<unsigned long long>(from.drawn));
  }

  const BertMark& at() const { return at_; }

  // Calls sample(first, end, target) for those of the next document.
  template <typename Sample>
  void pass_document(const Sample& sample) {
    std::int64_t first = of_.documents[at_.document];
    const std::int64_t end = of_.documents[at_.document + 1];
    at_.document = (at_.document + 1) % of_.num_documents;
    if (end - first < of_.least_sentences || (end - first > 1 && has_long_sentence(first, end))) return;
    std::int64_t target = draw_target();
    std::int64_t tokens = 0;
    for (std::int64_t next = first; next < end;) {
      tokens += of_.lengths[next++];
      // The last sentence of a document is not left to a sample of its own.
      const bool full = tokens >= target && end - next > 1 && next - first >= of_.least_sentences;
      if (!full && next < end) continue;
      sample(first, next, target);
      ++at_.samples;
      first = next;
      tokens = 0;
      target = draw_target();
    }
  }

 private:
  bool has_long_sentence(std::int64_t first, std::int64_t end) const {
    return std::any_of(of_.lengths + first, of_.lengths + end,
                       [](std::int32_t length) { return length > kLongestSentence; });
  }

  std::int64_t draw_target() {
    if (of_.short_every == 0) return of_.sequence_length;
    ++at_.drawn;
    const auto number = static_cast<std::int64_t>(random_());
    return number % of_.short_every == 0 ? 2 + number % (of_.sequence_length - 1) : of_.sequence_length;
  }

  const Sentences& of_;
  BertMark at_;
  std::mt19937 random_;
};

// As Megatron-LM does: from the last row on, each with a random one before it. Which ones does not depend on the rows,
// so they are chosen, and asked of the memory, some steps ahead.
template <typename Row>
void shuffle(std::uint64_t seed, std::int64_t num_rows, Row* rows) {
  std::mt19937_64 random(seed);  // as there may be more rows than 32 bits can choose from
  std::array<std::int64_t, kAhead> others{};
  const auto choose = [&](std::int64_t row) {
    const auto other = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(row + 1));
    others[static_cast<std::size_t>(row) % kAhead] = other;
    __builtin_prefetch(rows + 3 * other, 1);
  };
  std::int64_t chosen = num_rows - 1;
  for (std::int64_t row = num_rows - 1; row > 0; --row) {
    for (; chosen > 0 && chosen > row - static_cast<std::int64_t>(kAhead); --chosen) choose(chosen);
    std::swap_ranges(rows + 3 * row, rows + 3 * row + 3, rows + 3 * others[static_cast<std::size_t>(row) % kAhead]);
  }
}

}  // namespace

std::vector<BertMark> mark_bert_samples(const Sentences& sentences, std::int64_t spacing) {
  check(sentences);
  Walk walk(sentences, BertMark{});
  std::vector<BertMark> marks{walk.at()};
  while (walk.at().samples < sentences.requested) {
    const std::int64_t before = walk.at().samples;
    for (std::int64_t document = 0; document < sentences.num_documents; ++document) {
      if (walk.at().samples - marks.back().samples >= spacing) marks.push_back(walk.at());
      walk.pass_document([](std::int64_t, std::int64_t, std::int64_t) {});
    }
    if (walk.at().samples == before) break;  // nor has another epoch one
  }
  marks.push_back(walk.at());
  return marks;
}

template <typename Row>
void build_bert_mapping(const Sentences& sentences, const std::vector<BertMark>& marks, std::int64_t threads,
                        Row* rows) {
  check(sentences);
  const auto parts = static_cast<std::int64_t>(marks.size()) - 1;
  for_each_part(parts, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    Walk walk(sentences, marks[static_cast<std::size_t>(begin)]);
    Row* next = rows + 3 * walk.at().samples;
    while (walk.at().samples < marks[static_cast<std::size_t>(end)].samples) {
      walk.pass_document([&next](std::int64_t first, std::int64_t after, std::int64_t target) {
        *next++ = static_cast<Row>(first);
        *next++ = static_cast<Row>(after);
        *next++ = static_cast<Row>(target);
      });
    }
  });
  shuffle(std::uint64_t{sentences.seed} + 1, marks.back().samples, rows);
}

template void build_bert_mapping(const Sentences&, const std::vector<BertMark>&, std::int64_t, std::uint32_t*);
template void build_bert_mapping(const Sentences&, const std::vector<BertMark>&, std::int64_t, std::uint64_t*);

}  // namespace megatron
