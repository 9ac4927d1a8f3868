"""What `preprocess_data.py` is made of: inputs, their records, sentences, fast tokenizers, shards, workers."""
