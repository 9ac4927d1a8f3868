"""Data parallelism: contiguous buffers of parameters and gradients, and the reductions of gradients."""
