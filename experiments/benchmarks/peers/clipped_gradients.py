"""The plain gradient and clipped sums by PyTorch, Opacus and opake, and their time and memory.

A way takes a model, a function (model, inputs, targets) -> losses [rows], and parts: (inputs,
targets) of some rows each. It returns a function of parts that computes all of their gradients.
"""

import ctypes
import time
import warnings
from pathlib import Path

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

warnings.simplefilter("ignore")
torch.set_num_threads(1)
NORM = 1.0


def plain(model, losses):
    """The sum of the gradients, without clipping."""

    def call(parts):
        model.zero_grad()
        for part in parts:
            losses(model, *part).sum().backward()

    return call


def hooks(model, losses):
    """Opacus with a gradient of each example."""
    model = GradSampleModule(model, loss_reduction="sum")
    optimizer = _optimizer(DPOptimizer, model)

    def call(parts):
        optimizer.zero_grad()
        for p in model.parameters():
            p.summed_grad = None
        for part in parts:
            losses(model, *part).sum().backward()
            optimizer.clip_and_accumulate()
            for p in model.parameters():
                p.grad_sample = None

    return call


def ghost(model, losses):
    """Opacus with two backward passes and the norm alone of each example."""
    model = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=NORM, use_ghost_clipping=True, loss_reduction="sum"
    )
    optimizer = _optimizer(DPOptimizerFastGradientClipping, model)

    def call(parts):
        for p in model.parameters():
            p.summed_grad = None
        for part in parts:
            of_rows = losses(model, *part)
            DPTensorFastGradientClipping(model, optimizer, of_rows, "sum").backward()
            optimizer.signal_skip_step()  # the next call adds the gradients up
            optimizer.step()

    return call


def _optimizer(kind, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    how = {"noise_multiplier": 0.0, "max_grad_norm": NORM, "expected_batch_size": 1}
    return kind(torch.optim.SGD(trained, lr=0.0), loss_reduction="sum", **how)


def functional(model, losses):
    """opake, which maps the gradient of one example over a part."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.patches import apply_model_patches

    apply_model_patches(model)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(trained, *example):
        def called(*args, **kwargs):
            return torch.func.functional_call(model, trained, args, kwargs)

        return losses(called, *(x[None] for x in example)).sum()

    clipped, state = clipped_grad(loss, clipping_norm=NORM, batch_argnums=(1, 2))

    def call(parts):
        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        for part in parts:
            grads, _ = clipped(trained, *part, state=state)
            for name, grad in grads.pytree.items():
                total[name] += grad
        return total

    return call


WAYS = {"plain": plain, "hooks": hooks, "ghost": ghost, "opake": functional}


def seconds(call, parts):
    """Processor seconds of a call."""
    start = time.process_time()
    call(parts)
    return time.process_time() - start


def resident(field):
    """VmRSS or VmHWM, its peak, of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def give_back():
    """Return freed memory to the machine."""
    ctypes.CDLL(None).malloc_trim(0)


def trial(model, call, parts):
    """(processor seconds, memory in MiB beside parameters and result) of a call."""
    call(parts[:1])  # a first call sets up more
    for p in model.parameters():
        p.grad = p.grad_sample = p.summed_grad = None
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, spent = resident("VmRSS"), seconds(call, parts)
    result = sum(4 * p.numel() for p in model.parameters() if p.requires_grad) / 2**20
    return spent, round(resident("VmHWM") - before - result, 1)
