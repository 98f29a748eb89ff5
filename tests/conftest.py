from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

# Triton's interpreter multiplies with NumPy. In OpenBLAS's AVX2 kernels, unlike on GPUs, the rounding of a row depends
# on its place in a block. So these kernels are switched off. NumPy reads the variable at its first import; processors
# other than x86 ignore it.
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a network
pytest.register_assert_rewrite("helpers")

# In CI, Hypothesis always draws the same examples, so that a failure is due to the change. Elsewhere they vary.
settings.register_profile(
    "long",
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.register_profile("default", settings.get_profile("long"), max_examples=20)
# For a seeded fault it is enough that an example fails, so the example is not shrunk.
settings.register_profile(
    "fault", settings.get_profile("long"), max_examples=200, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Decide whether this process interprets kernels or runs them on a GPU, before torch and Triton are imported."""
    if config.option.markexpr.split()[:1] == ["gpu"]:
        os.environ.setdefault("GSPO_TEST_DEVICE", "cuda")
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ.setdefault("GSPO_CACHE_MIB", "0")  # tests count passes and name the caches that they use
        from helpers.device import obstacle

        if not config.option.collectonly and (reason := obstacle()):
            raise pytest.UsageError(f"-m gpu: {reason}")
    else:
        os.environ["GSPO_TEST_DEVICE"] = "cpu"
        os.environ["TRITON_INTERPRET"] = "1"  # the compile gate runs in its own process
        from helpers.interpreter import prepare_interpreter

        prepare_interpreter()
    import torch

    # Shapes are so small that more threads are slower.
    torch.set_num_threads(int(os.environ.get("GSPO_TEST_THREADS", "1")))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test that can run on a GPU, so that `-m gpu` selects it."""
    if os.environ["GSPO_TEST_DEVICE"] != "cpu" and "device" in getattr(item, "fixturenames", ()):
        item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        from helpers.device import obstacle

        if reason := obstacle():
            pytest.skip(reason)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def device() -> object:
    """Return the torch.device under test. A test that takes this fixture also runs on a GPU."""
    from helpers.device import DEVICE

    return DEVICE


@pytest.fixture
def cached_memory_is_returned() -> Iterator[None]:
    """Release PyTorch's cached GPU memory after a test of large tensors, because other processes share the GPU."""
    yield
    import torch

    torch.cuda.empty_cache()


# What the tests of each folder show, printed with their number after a run.
SHOWN = {
    "math": "values, gradients and clip decisions equal float64 references and the trainers' formulas",
    "api": "bad inputs are named, every form of input gives the same result, gspo doctor finds what is wrong",
    "backends": "interpreted Triton kernels compute what PyTorch computes, within the memory and work that is promised",
    "integrations": "Hugging Face heads, the trainers' hooks and the reference trainer compute the same loss",
    "distributed": "sharded heads and sequences on several processes compute what one process computes",
    "stub": "Triton's launcher accepts every launch on a stub of the CUDA driver",
    "trainers": "TRL, verl, DeepSpeed and Megatron train with our log-probs as with their own",
    "benchmarks": "the benchmarks run, and the published numbers are those of their results",
    "release": "the wheel is complete and works once installed by name, and the kernels package loads our hub layout",
    "repo": "README and docs are right, and imports are few",
    "faults": "the tests detect faults that are seeded in the library",
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = Counter(report.nodeid.split("/")[1] for report in terminalreporter.getreports("passed"))
    for folder, claim in SHOWN.items():
        if passed[folder]:
            terminalreporter.write_line(f"{passed[folder]:6,} passed: {claim}")
