"""The plain gradient of LoRA adapters by PyTorch, transformers and PEFT; run by benchmarks.lora.

Arguments: vocabulary, positions, width, layers, heads, key-value heads, width of the MLP, rank,
rows, turns. Prints processor seconds of the gradient of all rows, by rows of a pass, as one line.
"""

import json
import statistics
import sys
import time

import peft
import torch
import transformers

torch.set_num_threads(1)
VOCABULARY, POSITIONS, WIDTH, LAYERS, HEADS, KV_HEADS, MLP, RANK, ROWS, TURNS = map(
    int, sys.argv[1:]
)


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
    base = transformers.LlamaForCausalLM(config)
    every = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(base, every)
    tokens = torch.randint(VOCABULARY, (ROWS, POSITIONS))

    def seconds(rows):
        start = time.process_time()
        model.zero_grad()
        for part in tokens.split(rows):
            model(input_ids=part, labels=part).loss.backward()
        return time.process_time() - start

    passes = [rows for rows in (1, 2, 4, 8) if rows <= ROWS]
    found = {rows: [seconds(rows) for _ in range(TURNS + 1)][1:] for rows in passes}
    print(json.dumps({f"peft:{rows}": statistics.median(times) for rows, times in found.items()}))


if __name__ == "__main__":
    main()
