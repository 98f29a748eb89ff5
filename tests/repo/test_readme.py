"""The README does what it says."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
import torch
from helpers.faults import FAULTS
from helpers.readme import CONSTRAINTS, PYTORCH_LOOP, QUICK_START, README, ROOT
from packaging.requirements import Requirement

from gspo_kernels import LossOutput
from gspo_kernels.metrics import NAMES


def test_the_quick_start_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, comment = QUICK_START.rpartition("\n# ")
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert comment.startswith(capsys.readouterr().out.strip())
    assert scope["hidden"].grad[2].count_nonzero() == 0


def test_the_model_example_is_the_gradient_of_the_dense_loss_and_adds_up_over_micro_batches() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).double().eval()
    ids, attention = torch.randint(0, 50, (4, 9)), torch.ones(4, 9, dtype=torch.int64)
    completion = torch.arange(9) >= torch.tensor([[3], [4], [2], [5]])
    advantages = torch.randn(4)
    log_probs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    mask = completion[:, 1:]
    old = (log_probs + 1e-4 * torch.randn(4, 8)).detach()
    u = ((log_probs - old) * mask).sum(1) / mask.sum(1)
    surrogate = torch.minimum(u.exp() * advantages, u.exp().clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    (-surrogate.mean()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    scope: dict[str, Any] = {"model": model, "input_ids": ids, "attention_mask": attention}
    scope |= {"completion_mask": completion, "advantages": advantages}
    exec(PYTORCH_LOOP, scope)
    assert (scope["old_log_probs"] - log_probs)[mask].abs().max() < 1e-12
    model.zero_grad()
    for part in (slice(0, 1), slice(1, 4)):
        metrics = scope["gspo_step"](
            model, ids[part], attention[part], completion[part], advantages[part], old[part], 4
        )
        assert metrics["clip_fraction"].ndim == 0
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=name)


def test_the_docstring_explains_every_metric() -> None:
    assert LossOutput.__doc__ is not None
    for name in (*NAMES, "invalid"):
        stem = name.removesuffix("_low").removesuffix("_high")
        assert stem in LossOutput.__doc__, name


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_commands_it_names_exist() -> None:
    targets = re.findall(r"^make ([\w-]+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert len(makefile.splitlines()) < 60
    assert {"make test", "make test-trainers"} <= set((ROOT / ".ci" / "run").read_text().splitlines())


def test_files_it_names_exist_and_links_work_on_a_package_index() -> None:
    for path in re.findall(r"`((?:docs|examples)/[\w./]+|[A-Z]+\.md)`", README):
        assert (ROOT / path).exists(), path
    images, links = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README), re.findall(r"(?<!!)\[[^]]*\]\(([^)]+)\)", README)
    assert all((ROOT / image).exists() for image in images)
    assert all(link.startswith("https://") for link in links)


def test_the_tested_versions_are_the_installed_ones() -> None:
    pins = [Requirement(line) for line in CONSTRAINTS.splitlines() if not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert len(pins) == 7
    for pin in pins:
        assert pin.specifier.contains(version(pin.name).split("+")[0]), pin


def test_the_number_of_faults_is_that_of_the_tests() -> None:
    (number,) = re.findall(r"more than (\d+) seeded faults", README)
    assert int(number) < len(FAULTS)
