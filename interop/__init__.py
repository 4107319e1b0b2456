"""Adapters that name another framework: torch, jax, safetensors, distributed."""
