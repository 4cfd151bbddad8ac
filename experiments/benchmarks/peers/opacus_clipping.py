"""Opacus on the transformer of `benchmarks.clipping`: processor seconds and memory, a line of JSON.

Arguments: width, layers, vocabulary, positions, rows, turns. The head is not tied to the embedding,
which Opacus does not support; the work is the same, the parameters are a few more.
"""

import ctypes
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional

warnings.simplefilter("ignore")
torch.set_num_threads(1)
WIDTH, LAYERS, VOCABULARY, POSITIONS, ROWS, TURNS = map(int, sys.argv[1:])


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


def parts(tokens, rows):
    for part in tokens.split(rows):
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def plain(tokens, rows):
    model = Transformer()

    def call():
        model.zero_grad()
        for x, y in parts(tokens, rows):
            functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    return model, call


def hooks(tokens, rows):
    model = GradSampleModule(Transformer(), loss_reduction="mean")
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = DPOptimizer(
        inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=ROWS
    )

    def call():
        optimizer.zero_grad()
        for p in model.parameters():
            p.summed_grad = None
        for x, y in parts(tokens, rows):
            functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.clip_and_accumulate()
            for p in model.parameters():
                p.grad_sample = None

    return model, call


def ghost(tokens, rows):
    model = GradSampleModuleFastGradientClipping(
        Transformer(), max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = DPOptimizerFastGradientClipping(
        inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=ROWS
    )
    loss_fn = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss(reduction="mean"))

    def call():
        optimizer.zero_grad()
        for x, y in parts(tokens, rows):
            logits = model(x)
            loss_fn(logits.flatten(0, 1), y.flatten(), shape=logits.shape).backward()

    return model, call


def resident(field):
    """VmRSS or VmHWM, its peak, of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def peak_mib(model, call):
    """What a call needs beside parameters and result. Not of a first call, which sets up more."""
    for p in model.parameters():
        p.grad = p.grad_sample = p.summed_grad = None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    call()
    result = sum(4 * p.numel() for p in model.parameters()) / 2**20
    return round(resident("VmHWM") - before - result, 1)


def main():
    tokens = torch.randint(VOCABULARY, (ROWS, POSITIONS + 1))
    calls = {"torch plain": plain, "opacus hooks": hooks, "opacus ghost": ghost}
    seconds, memory = {}, {}
    for name, make in calls.items():
        found = []
        for rows in (4, 16):
            (model, call), times = make(tokens, rows), []
            for _ in range(TURNS + 1):
                start = time.process_time()
                call()
                times.append(time.process_time() - start)
            found.append((statistics.median(times[1:]), peak_mib(model, call)))
        seconds[name], memory[name] = min(found)
    print(json.dumps({"seconds": seconds, "memory_mib": memory}))


if __name__ == "__main__":
    main()
