"""From token files to the micro-batches of a step.

The order of the samples is a function of (files, split, seed, requested samples), the same as Megatron-LM's;
the position in it is the number of consumed samples, whatever the layout.
"""
