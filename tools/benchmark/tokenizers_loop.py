"""What `data.py` measures preprocessing beside: the loop that one writes with `tokenizers`, and nothing else.

python tools/benchmark/tokenizers_loop.py CORPUS VOCAB MERGES OUTPUT_PREFIX

Texts of JSON lines go to `encode_batch_fast`, 1,000 at once, over as many threads as RAYON_NUM_THREADS says; ids, each
document ended by <|endoftext|>, and index are written as Megatron-LM's files.
"""

import json
import struct
import sys
from itertools import islice

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


def main() -> None:
    corpus, vocab, merges, prefix = sys.argv[1:]
    tokenizer = Tokenizer(BPE.from_file(vocab, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    eod = tokenizer.token_to_id("<|endoftext|>")
    lengths: list[int] = []
    with open(corpus, encoding="utf-8") as lines, open(f"{prefix}.bin", "wb") as output:
        while texts := [json.loads(line)["text"] for line in islice(lines, 1000)]:
            for encoding in tokenizer.encode_batch_fast(texts):
                ids = np.array([*encoding.ids, eod], np.uint16)
                output.write(ids.tobytes())
                lengths.append(ids.size)
    sizes = np.array(lengths, np.int64) * 2
    with open(f"{prefix}.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(lengths) + 1))
        index.write(np.array(lengths, np.int32).tobytes())
        index.write((np.cumsum(sizes) - sizes).tobytes())
        index.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


if __name__ == "__main__":
    main()
