from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported; the compile gate runs in its own process
# The interpreter multiplies by NumPy, and where OpenBLAS uses AVX2 it rounds a row by its place in a block, which no
# GPU does. Read when NumPy is first imported; on other processors than x86 the name is unknown and changes nothing.
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"  # also where the machine asks for another

import inspect

import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, Phase, settings
from triton.runtime import interpreter

pytest.register_assert_rewrite("helpers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in these tests may need a network
torch.set_num_threads(1)  # the shapes are tiny: threads would only wait for each other

# A run of CI repeats the same examples, so that it judges the change; everywhere else the search goes on.
settings.register_profile(
    "default",
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.register_profile("quick", settings.get_profile("default"), max_examples=10)
# For seeded faults: that an example fails is enough.
settings.register_profile("fault", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("default")


# Triton's interpreter patches its language anew at every call of a device function, which is half of a test's time. In
# a process that only interprets, once is enough.
_patched: set[frozenset[int]] = set()
_patch_lang = interpreter._patch_lang


def _patch_lang_once(fn: object) -> object:
    names = fn.__globals__.values()  # pyright: ignore[reportAttributeAccessIssue]
    languages = frozenset(id(x) for x in names if inspect.ismodule(x) and x in (tl, tl.core))
    if languages not in _patched:
        _patch_lang(fn)
        _patched.add(languages)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_lang_once  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="no slow tests, at most two cases of a test per backend")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, keep the last case of each test and backend, of the torch backend also the first; no slow tests."""
    if not config.getoption("--quick"):
        return
    cases: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            cases.setdefault((item.nodeid.partition("[")[0], parameters.get("backend")), []).append(item)
    kept: set[int] = set()
    for (_, backend_name), group in cases.items():
        # The last case often has every option. Interpreted kernels are slow: they get only that one.
        kept |= {id(item) for item in (group[-1:] if backend_name == "triton" else (group[0], group[-1]))}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
