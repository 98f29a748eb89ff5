"""Every argument and environment variable is compared between ranks, or excused with a reason.

helpers/sharded_agreement.py tests on several processes that ranks which differ raise an error.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.sharded_agreement import FUNCTIONS, arguments

from gspo_kernels.inputs.compared import ENVIRONMENT
from gspo_kernels.ranks import agreement

ROOT = Path(__file__).parent.parent.parent
EXCUSED_VARIABLES = {
    "RANK": "the launcher sets it, different on each rank",
    "LOCAL_RANK": "the launcher sets it, different on each rank",
    "WORLD_SIZE": "read before there are groups",
    "VERL_ENGINE_VENDOR": "read when verl is imported; selects an engine, which calls the library",
    "XDG_CACHE_HOME": "folder in which the self-check remembers its result",
    "WANDB_PROJECT": "names a run of Weights & Biases",
}


@pytest.mark.parametrize(("function", "kind"), FUNCTIONS, ids=lambda x: getattr(x, "__name__", x))
def test_every_argument_is_compared_or_excused(
    function: Callable[..., Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: dict[str, Any] = {}

    @contextlib.contextmanager
    def record(*_: Any) -> Iterator[dict[str, Any]]:
        yield compared

    # By its name, because the package exports a function of the same name.
    module = importlib.import_module(function.__module__)
    monkeypatch.setattr(module, "same_on_all_ranks", record)
    function(**arguments(function, kind, None))
    names = {name.partition(".")[0] for name in compared}
    excused = agreement.EXCUSED[kind]
    assert inspect.signature(function).parameters.keys() - names - excused.keys() == set()
    assert all(excused.values()), "each has a reason"


def test_every_environment_variable_is_compared_or_excused() -> None:
    reads = r'environ(?:\.get\(|\[)\s*"(\w+)"|getenv\(\s*"(\w+)"|"(\w+)" in os\.environ|"(GSPO_\w+)"'
    sources = [path for x in ("gspo_kernels", "integrations") for path in (ROOT / x).rglob("*.py")]
    found = {"".join(names) for path in sources for names in re.findall(reads, path.read_text())}
    assert found == ENVIRONMENT.keys() | EXCUSED_VARIABLES.keys()
