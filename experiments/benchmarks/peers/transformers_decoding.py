"""Sampling by transformers' `generate` on PyTorch; run by benchmarks.decoding.

Arguments: vocabulary, positions, width, layers, heads, key-value heads, width of the MLP, tokens,
turns, and batch sizes. Prints processor seconds for each batch size, by size, as one line.
"""

import json
import statistics
import sys
import time

import torch
import transformers

torch.set_num_threads(1)
VOCABULARY, POSITIONS, WIDTH, LAYERS, HEADS, KV_HEADS, MLP, TOKENS, TURNS = map(int, sys.argv[1:10])


def main():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}

    def seconds(rows):
        start = time.process_time()
        with torch.inference_mode():
            texts = model.generate(torch.ones((rows, 1), dtype=torch.long), pad_token_id=0, **how)
        assert texts.shape == (rows, TOKENS + 1)
        return time.process_time() - start

    sizes = [int(rows) for rows in sys.argv[10:]]
    found = {rows: [seconds(rows) for _ in range(TURNS + 1)][1:] for rows in sizes}
    print(json.dumps({str(rows): statistics.median(times) for rows, times in found.items()}))


if __name__ == "__main__":
    main()
