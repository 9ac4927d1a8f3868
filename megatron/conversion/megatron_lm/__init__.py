"""Checkpoints of Megatron-LM: read in every layout that it has written, and written in the one that it always reads."""
