"""Gradients of LoRA adapters by PyTorch, transformers and PEFT; run by benchmarks.lora and others.

Arguments: shape as `run.shape_of` gives it, rank (0: all weights are trained, without PEFT),
tokens of each row, ways with their rows of a pass; all JSON. Rows are sorted by length, and those
of a pass padded to the longest. Prints a trial's processor seconds and peak memory in MiB by
WAY:ROWS, as one line; then, for each line read, the processor seconds of the call of that name.
"""

import json
import sys

import peft
import torch
import transformers
from clipped_gradients import WAYS, give_back, seconds, trial
from torch.nn import functional

SHAPE, RANK, SIZES, ROWS = sys.argv[1], *map(json.loads, sys.argv[2:])
IGNORED = -100
SIDE = 1024  # of the matrices that measure the machine


def losses(model, inputs, targets):
    """Mean cross entropy of each row's tokens."""
    logits = model(input_ids=inputs, use_cache=False).logits
    nats = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    return nats.sum(1) / (targets != IGNORED).sum(1)


def llama():
    """The model, with random weights; its head is its embedding."""
    config = transformers.LlamaConfig(**json.loads(SHAPE), tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def adapted(way):
    """The model with adapters in all its layers, which alone are trained; without any at rank 0."""
    torch.manual_seed(0)
    if RANK == 0:
        model = llama()
        if way == "ghost":  # which refuses weights that two layers share
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model
    how = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear")
    return peft.get_peft_model(llama(), how)


def parts(rows, vocabulary):
    """(inputs, targets) of so many rows each, as long as the longest of them."""
    sizes, found = sorted(SIZES, reverse=True), []
    for first in range(0, len(sizes), rows):
        some = torch.tensor(sizes[first : first + rows])[:, None]
        tokens = torch.randint(1, vocabulary, (len(some), int(some.max())))
        there = torch.arange(tokens.shape[1]) < some
        targets = tokens.masked_fill(~there, IGNORED)[:, 1:].contiguous()
        found.append((tokens.masked_fill(~there, 0)[:, :-1].contiguous(), targets))
    return found


def products(sides):
    """Twenty products of large matrices, by which the machine is measured."""
    for _ in range(20):
        torch.mm(*sides)


def main():
    calls, trials = {"products": (products, torch.randn(2, SIDE, SIDE))}, {}
    for way, every in ROWS.items():
        model = adapted(way)
        call = WAYS[way](model, losses)
        for rows in every:
            name, given = f"{way}:{rows}", parts(rows, model.config.vocab_size)
            calls[name], trials[name] = (call, given), trial(model, call, given)
            print(name, *trials[name], file=sys.stderr, flush=True)
    print(json.dumps(trials), flush=True)
    for line in sys.stdin:
        print(seconds(*calls[line.strip()]), flush=True)
        give_back()  # other processes take turns


if __name__ == "__main__":
    main()
