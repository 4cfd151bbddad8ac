"""Opacus on the transformer of `benchmarks.clipping`: processor seconds and memory, a line of JSON.

Arguments: width, layers, vocabulary, positions, rows, turns. The head is not tied to the embedding,
which Opacus does not support; the work is the same, the parameters are a few more.
"""

import json
import statistics
import sys

import torch
from clipped_gradients import WAYS, seconds, trial
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, VOCABULARY, POSITIONS, ROWS, TURNS = map(int, sys.argv[1:])
PASSES = (4, 16)


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm_1(x)
        shape = (*y.shape[:2], WIDTH // 64, 64)
        heads = [
            layer(y).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Tokens to logits."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
        x = self.embed(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def losses(model, inputs, targets):
    """Mean cross entropy of each row's tokens."""
    logits = model(inputs)
    nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view(targets.shape).mean(1)


def main():
    tokens = torch.randint(VOCABULARY, (ROWS, POSITIONS + 1))
    ways = {"torch plain": "plain", "opacus hooks": "hooks", "opacus ghost": "ghost"}
    found = {"seconds": {}, "memory_mib": {}}
    for name, way in ways.items():
        model, tried = Transformer(), []
        call = WAYS[way](model, losses)
        for rows in PASSES:
            parts = [
                (part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(rows)
            ]
            _, memory = trial(model, call, parts)
            times = [seconds(call, parts) for _ in range(TURNS)]
            tried.append((statistics.median(times), memory))
        found["seconds"][name], found["memory_mib"][name] = min(tried)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
