"""Llamas with random weights, of the shape that `run.shape_of` describes."""

import json

import transformers


def llama(shape: str) -> transformers.LlamaForCausalLM:
    """The model of a shape, as JSON; its head is its embedding."""
    config = transformers.LlamaConfig(**json.loads(shape), tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)
