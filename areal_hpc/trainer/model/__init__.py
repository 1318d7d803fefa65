"""Models: Megatron-core networks, packed attention, weights in Hugging Face's form, memory."""
