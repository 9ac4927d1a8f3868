// Which sentences make up which sample of BERT. Plain pointers and sizes; see bert_mapping.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace megatron {

// Sentences of a split and how they are taken.
//
// lengths[num_sentences]          tokens of each sentence of the file
// documents[num_documents + 1]    first sentence of each document, then the end of the last one
// sequence_length                 tokens that a sample may hold, without [CLS] and [SEP]; at least 2
// short_every                     one sample in so many aims at a shorter length; 0: none
// least_sentences                 of a sample: 2 for pairs, else 1
// requested                       whole epochs are walked until they hold so many samples
struct Sentences {
  const std::int32_t* lengths;
  std::int64_t num_sentences;
  const std::int64_t* documents;
  std::int64_t num_documents;
  std::int64_t sequence_length;
  std::int64_t short_every;
  std::int64_t least_sentences;
  std::int64_t requested;
  std::uint32_t seed;
};

// A document at which samples can be begun, and what lies before it.
struct BertMark {
  std::int64_t document;
  std::int64_t drawn;    // random numbers
  std::int64_t samples;
};

// Marks at least `spacing` samples apart but for the last, which is behind the last sample; the first is at the first
// document. Two of them where an epoch has no sample.
// Throws std::out_of_range for a sentence that does not exist.
std::vector<BertMark> mark_bert_samples(const Sentences& sentences, std::int64_t spacing);

// The samples between the marks, written down and shuffled.
//
// rows[3 * samples]   out: first sentence, end of the sentences, length that the sample aims at
template <typename Row>
void build_bert_mapping(const Sentences& sentences, const std::vector<BertMark>& marks, std::int64_t threads, Row* rows);

}  // namespace megatron
