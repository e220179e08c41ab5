"""A small Llama of transformers with random weights. Nothing in this file knows adaptra."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM


def llama(**settings: Any) -> LlamaForCausalLM:
    """Build a Llama of four layers. ``settings`` go into its configuration."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    return LlamaForCausalLM(config)
