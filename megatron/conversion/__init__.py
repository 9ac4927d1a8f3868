"""Models in the forms of other programs, in and out: Hugging Face and Megatron-LM."""
