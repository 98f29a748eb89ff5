"""Results of the torch backend do not depend on its threads, and errors in threads are raised in the caller."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.array import run
from helpers.features import make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, memory
from gspo_kernels.backends.torch import tiles as torch_tiles
from gspo_kernels.backends.torch import workers

VOCAB = 9000  # more columns than one tile, so that threads share the work
DEADLINE = 60  # seconds


@pytest.fixture(autouse=True)
def _restore_one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def results(threads: int, **options: Any) -> list[Tensor]:
    """Return loss, log-probs, entropy, metrics and gradients of a batch, computed with `threads` PyTorch threads."""
    torch.set_num_threads(threads)
    dtype, vocab = options.pop("dtype", torch.float32), options.pop("vocab", VOCAB)
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 70, 16, generator=rng).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(vocab, 16, generator=rng)).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=rng).to(dtype).requires_grad_()
    ids = torch.randint(vocab, (6, 70), generator=rng)
    advantages = torch.tensor([1.0, -1, 0, 0.5, -2, 1])
    out = gspo_fused_loss(hidden, weight, ids, advantages, bias=bias, backend="torch", **options)
    gradients = torch.autograd.grad(out.loss, (hidden, weight, bias))
    return [out.loss, out.log_probs, *([] if out.entropy is None else [out.entropy]), *out.metrics.values(), *gradients]


OPTIONS = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp64": {"dtype": torch.float64},
    "budget": {"gradient_budget": 0.3},
    "entropy bonus": {"objective": Objective(entropy_coef=0.01)},
    "soft-cap": {"logit_softcap": 5.0, "temperature": 0.7},
    "one narrow tile": {"vocab": 22},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_bit_depends_on_the_number_of_threads(name: str) -> None:
    expected = results(1, **OPTIONS[name])
    for threads in (2, 3, 7):
        for a, b in zip(expected, results(threads, **OPTIONS[name]), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("settings", ["", "frozen=hidden", "frozen=weight", "frozen=hidden kept_sets=offsets"])
def test_no_gradient_of_adapters_depends_on_the_number_of_threads(settings: str) -> None:
    case = make(f"head=two_loras tiles=many {settings}")
    expected = run(case).gradients
    for threads in (2, 3):
        torch.set_num_threads(threads)
        ours = run(case).gradients
        assert ours.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in ours.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tiles_of_all_threads_fit_the_workspace(dtype: torch.dtype) -> None:
    torch.set_num_threads(64)
    with FakeTensorMode():
        tiles = torch_tiles.Tiles(memory.Batch(256, 4096, 151_936).head(dtype), torch.arange(256))
    numbers = tiles.tile_rows * (torch_tiles._TILES_IN_MEMORY * tiles.tile_columns + 4096)
    numbers += 2 * tiles.tile_columns * 4096 * (dtype == torch.bfloat16)  # fp32 copies of the weight
    assert 1 < tiles.threads < 64 and tiles.threads * 4 * numbers <= tiles.head.workspace


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_run_in_inference_mode_and_keep_no_tensor(threads: int) -> None:
    torch.set_num_threads(threads)
    hidden, weight = torch.randn(300, 16), torch.randn(VOCAB, 16)
    seen = weakref.ref(weight)
    with torch.inference_mode():
        inside = linear_log_probs(hidden, weight, torch.arange(300)).log_probs
    assert torch.equal(inside, linear_log_probs(hidden, weight, torch.arange(300)).log_probs)
    del weight
    end = time.monotonic() + DEADLINE  # a thread releases its job shortly after the result is ready
    while seen() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert seen() is None


def test_every_tile_is_computed_by_a_single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # An operation that PyTorch splits over threads waits for the slowest thread, which a busy machine may delay.
    seen: list[tuple[str, int]] = []
    logits = torch_tiles.Tiles.logits

    def recorded(self: Any, *args: Any) -> Tensor:
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        return logits(self, *args)

    monkeypatch.setattr(torch_tiles.Tiles, "logits", recorded)
    results(2)
    assert len(seen) > 20 and {count for _, count in seen} == {1}
    assert all(name.startswith("gspo_kernels") for name, _ in seen)
    assert torch.get_num_threads() == 2


def test_the_first_error_is_raised_and_errors_of_waiting_threads_are_not() -> None:
    """Afterwards the threads can be used again."""
    sums = workers.Sums(1, most_waiting=0)
    waiting = threading.Event()

    def work(task: int) -> None:
        if task == 0:
            waiting.wait(DEADLINE)
            time.sleep(0.05)  # until the other task is inside `add`
            raise MemoryError("of task 0")
        waiting.set()
        sums.add(0, task, lambda: None)  # waits for task 0

    with pytest.raises(MemoryError, match="of task 0"):
        workers.run(work, range(2), 2, sums)
    done: list[int] = []
    workers.run(done.append, range(40), 2)
    assert sorted(done) == list(range(40))


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=60)
def test_terms_are_added_in_order(indices: list[int], most_waiting: int, threads: int) -> None:
    sums = workers.Sums(3, most_waiting)
    added = [[], [], []]
    turns = [indices[:i].count(index) for i, index in enumerate(indices)]

    def work(task: int) -> None:
        if task % 3 == 0:
            time.sleep(0.0005)  # so that later terms arrive first
        index = indices[task]
        sums.add(index, turns[task], partial(added[index].append, turns[task]))

    workers.run(work, range(len(indices)), threads, sums)
    assert added == [list(range(indices.count(index))) for index in range(3)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_its_own_threads() -> None:
    # PyTorch's own threads do not survive a fork, so this test runs nothing that would start them.
    context = multiprocessing.get_context("fork")
    workers.run(lambda task: None, range(4), 2)
    answers = context.Queue()

    def child() -> None:
        names: list[str] = []
        workers.run(lambda task: names.append(threading.current_thread().name), range(4), 2)
        answers.put(len(names))

    process = context.Process(target=child, daemon=True)
    process.start()
    assert answers.get(timeout=DEADLINE) == 4
    process.join(DEADLINE)
    assert process.exitcode == 0


IMPORT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.calls.add((function.overloadpacket.__name__, args[0].dtype))
        return function(*args, **kwargs or {})


with Called() as mode:
    from gspo_kernels import gspo_fused_loss
from gspo_kernels.backends.precision import MKL_FUNCTIONS

expected = {(name, dtype) for name in MKL_FUNCTIONS for dtype in (torch.float32, torch.float64)}
assert {"exp", "log", "log1p", "sin", "tanh"} <= set(MKL_FUNCTIONS) and expected <= mode.calls, expected - mode.calls
"""


def test_importing_the_loss_calls_each_mkl_function_on_one_number() -> None:
    # Without these calls, the first torch.exp was inaccurate in 12 of 800 new processes on a busy machine
    # (benchmarks/NOTES.md).
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=DEADLINE)
    assert run.returncode == 0, run.stderr[-2000:]
