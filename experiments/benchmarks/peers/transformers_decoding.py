"""Sampling by transformers' `generate` on PyTorch; run by benchmarks.decoding.

Arguments: shape as `llama_model.llama` reads it, tokens, turns, and batch sizes. Prints processor
seconds for each batch size, by size, as one line.
"""

import json
import statistics
import sys
import time

import torch
from llama_model import llama

torch.set_num_threads(1)
SHAPE, TOKENS, TURNS = sys.argv[1], *map(int, sys.argv[2:4])


def main():
    model = llama(SHAPE).eval()
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}

    def seconds(rows):
        start = time.process_time()
        with torch.inference_mode():
            texts = model.generate(torch.ones((rows, 1), dtype=torch.long), pad_token_id=0, **how)
        assert texts.shape == (rows, TOKENS + 1)
        return time.process_time() - start

    sizes = [int(rows) for rows in sys.argv[4:]]
    found = {rows: [seconds(rows) for _ in range(TURNS + 1)][1:] for rows in sizes}
    print(json.dumps({str(rows): statistics.median(times) for rows, times in found.items()}))


if __name__ == "__main__":
    main()
