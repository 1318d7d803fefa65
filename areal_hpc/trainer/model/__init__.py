"""Megatron-core models, how they attend to packs, and Hugging Face's form of them."""
