"""Every script in examples/ runs as a user would start it, at a size that suits a CPU.

The test of verl_gspo.sh is in test_verl_main_ppo.py. `make test-trainers` runs megatron_tp.py in an environment with
Megatron Core.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import chat_model
from helpers.examples import EXAMPLES, imported
from helpers.ranks import run_ranks
from tolerance import MODEL_GRADIENT_RELATIVE, TRAINER_ABSOLUTE

from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.metrics import combine
from gspo_kernels.reference import gspo_reference_loss

needs_trl = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("trl", "datasets", "peft")), reason="needs the extra trl"
)
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
needs_notebooks = pytest.mark.skipif(find_spec("nbclient") is None, reason="needs the extra dev")


def run(folder: Path, *command: object, processes: int = 1) -> str:
    """Run an example in a folder and return its output. `command`: the file in examples/ and its arguments."""
    file, *arguments = command
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    started = [*(launcher if processes > 1 else [sys.executable]), EXAMPLES / str(file), *arguments]
    return output_of(folder, started)


def output_of(folder: Path, command: list[Any]) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    variables |= {"HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [str(x) for x in command], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def numbers(pattern: str, output: str) -> list[float]:
    """Return the number that follows each match of a pattern."""
    return [float(x) for x in re.findall(rf"{pattern} (-?\d+\.\d+)", output)]


def rise(output: str, name: str = "mean reward", place: str = " .* updates") -> float:
    """Return by how much the last printed mean of a reward exceeds the first."""
    ((first, last),) = re.findall(rf"{name}: (\d\.\d+){place}, (\d\.\d+) ", output)
    return float(last) - float(first)


@needs_trl
def test_accelerate_launches_the_trl_example_on_two_processes(tmp_path: Path) -> None:
    """Accelerate does not shard on CPUs, so with fsdp2.yaml this would run the same. See test_trl_zero_advantage.py."""
    path = EXAMPLES / "accelerate" / "ddp.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path]
    output = output_of(tmp_path, [*launch, EXAMPLES / "trl_gspo.py", "--steps", 60])
    assert rise(output) > 0.05  # rank 0 prints it once
    state = json.loads((tmp_path / "runs/trl_gspo/checkpoint-60/trainer_state.json").read_text())
    # Each process trains on 32 of 64 completions per step: 216 prompts last 216 * 8 / 64 = 27 steps.
    assert state["train_batch_size"] == 32 and state["epoch"] > 2
    assert any(row.get("clip_ratio/region_mean", 0) > 0 for row in state["log_history"])


@needs_trl
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero3"])
def test_accelerate_knows_every_key_of_the_configurations(config: str) -> None:
    """accelerate accepts unknown keys inside fsdp_config and deepspeed_config, and ignores them."""
    launch: Any = pytest.importorskip("accelerate.commands.launch")
    loaded = launch.load_config_from_file(str(EXAMPLES / "accelerate" / f"{config}.yaml"))
    expected = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
    assert loaded.distributed_type == expected[config] and loaded.num_processes == 2
    options = {action.dest for action in launch.launch_command_parser()._actions}
    assert {*loaded.fsdp_config, *loaded.deepspeed_config} <= options


@needs_trl
@pytest.mark.parametrize(
    ("head", "trained"),
    [("frozen", 32_768), ("lora", 32_768 + 16 * (64 + 15)), ("full", 32_768 + 15 * 64)],
)
def test_lora(head: str, trained: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    output = run(tmp_path, "trl_gspo_lora.py", "--head", head, "--steps", 40, "--output", "adapter")
    assert f"{trained:,} trained parameters" in output
    assert rise(output) > 0
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    changed = [name for name, x in weights.items() if "lora_B" in name and x.any()]  # LoRA's B begins with zeros
    assert any("q_proj" in name for name in changed)
    assert any("lm_head" in name for name in changed) == (head == "lora")
    assert any(name.endswith("lm_head.weight") for name in weights) == (head == "full")


@needs_trl
def test_gsm8k_toy(tmp_path: Path) -> None:
    output = run(tmp_path, "trl_gsm8k.py", "--toy", "--steps", 100, "--output", "out")
    assert rise(output, place=" at first") > 0.05
    assert int(re.findall(r"clipped answers: (\d+)%", output)[0]) > 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@needs_trl
def test_gsm8k_by_name(tmp_path: Path) -> None:
    """A folder openai/gsm8k, laid out as on the hub, stands in for the download."""
    from datasets import Dataset

    model = chat_model.save(tmp_path / "model")
    rows = [{"question": f"{a}+{a}?", "answer": f"{a} + {a} = {2 * a}\n#### {2 * a}"} for a in range(32)]
    data = tmp_path / "openai" / "gsm8k"
    (data / "main").mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(data / "main" / "train-00000-of-00001.parquet")
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
    )
    run(tmp_path, "trl_gsm8k.py", "--model", model, "--steps", 4, "--length", 8, "--output", "out")
    state = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())
    # Four updates of 8 * 4 completions train on one rollout of 16 prompts, half of the problems.
    assert state["global_step"] == 4 and state["epoch"] == 0.5


@needs_trl
def test_the_reward_of_gsm8k() -> None:
    solution = "Natalia sold 1,000 + 200 = 1200 clips.\n#### 1,200"
    answers = {
        "So she sold 1000 + 200.\n#### 1200": 1.0,
        "#### 1,200.": 1.0,
        "#### $1200": 0.5,  # the marker is not followed by the number
        "The answer is 1200.00": 0.5,
        "#### 1200 and then 7": 0.0,
        "#### -1200": 0.0,
        "": 0.0,
    }
    assert {text: imported("trl_gsm8k").score(text, solution) for text in answers} == answers


@needs_trl
def test_tools_in_trl(tmp_path: Path) -> None:
    output = run(tmp_path, "trl_tools.py", "--steps", 100)
    assert rise(output, "mean reward") > 0.1 and rise(output, "mean tools/call_frequency") > 0.1


@needs_trl
def test_custom_reward_in_trl(tmp_path: Path) -> None:
    output = run(tmp_path, "custom_reward.py", "--steps", 60)
    assert rise(output, "right") > 0.05 and "brief: " in output


def test_custom_reward_in_gspo_train(tmp_path: Path) -> None:
    file = EXAMPLES / "custom_reward.py"
    reward = f"reward={file}:right, 0.2*{file}:brief"
    command = [Path(sys.executable).parent / "gspo", "train", "seeds=0", "steps=3", reward]
    output_of(tmp_path, command)
    rows = [json.loads(line) for line in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if "reward/right" in row)
    assert 0 < step["reward/right"] < 1 and 0 < step["reward/brief"] <= 1


def test_plain_loop(tmp_path: Path) -> None:
    output = run(tmp_path, "plain_loop.py", "--steps", 31)
    rewards = numbers("reward", output)
    assert rewards[-1] > rewards[0] + 0.1
    clipped = re.findall(r"each update ([\d., ]+), gradient", output)
    for line in clipped:
        first, *others = map(float, line.split(", "))
        assert first == 0 and max(others) > 0.05  # before the first update, every ratio is exactly 1


def test_fsdp2_and_its_checkpoint(tmp_path: Path) -> None:
    output = run(tmp_path, "fsdp2.py", "--steps", 31, "--output", "sharded", processes=2)
    rewards = numbers("reward", output)
    assert rewards[-1] > rewards[0] + 0.1
    assert max(numbers("clipped", output)) > 0.05
    (continued,) = numbers("reward", run(tmp_path, "plain_loop.py", "--model", "sharded", "--steps", 1))
    assert continued > rewards[0] + 0.1


def test_packed_ddp(tmp_path: Path) -> None:
    output = run(tmp_path, "packed_ddp.py", "--steps", 31, processes=2)
    rewards = numbers("reward", output)
    assert rewards[-1] > rewards[0] + 0.1
    assert max(numbers("clipped", output)) > 0.05 and max(numbers("KL", output)) > 0.05


def packed_model(seed: int) -> Any:
    torch.manual_seed(seed)
    model = demo_policy().model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # far from uniform distributions, so that other sequences would change log-probs
    return model


def packed_sequences() -> list[Any]:
    """Make seven sequences (ids [L], mask [L], advantage)."""
    torch.manual_seed(2)
    lengths, prompts = (9, 2, 14, 11, 8, 5, 3), (4, 1, 3, 8, 2, 5, 1)  # the last but one has no answer
    ids = [torch.randint(3, 15, (length,)) for length in lengths]
    masks = [torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    masks[2][6:9] = False  # tokens of a tool
    return list(zip(ids, masks, torch.randn(len(lengths)).tolist(), strict=True))


def stale(log_probs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Change log-probs as if they were of another policy, so that four sequences are clipped."""
    return log_probs + 1e-3 * torch.sin(3.0 * batch["target_ids"] + batch["position_ids"])


def packed_rank(rank: int, folder: Path) -> None:
    example = imported("packed_ddp")
    example.TOKENS = 20
    dist.init_process_group("gloo")
    model, reference = packed_model(0), packed_model(1)
    example.fuse_head(model)
    example.fuse_head(reference)
    sequences = packed_sequences()
    batches = example.micro_batches(sequences[:5] if rank == 0 else sequences[5:])
    assert len(batches) == (3 if rank == 0 else 1)
    example.add_log_probs(batches, model, reference)
    names = ("old_log_probs", "ref_log_probs")
    saved: dict[str, Any] = {name: torch.cat([batch[name] for batch in batches]) for name in names}
    for batch in batches:
        batch["old_log_probs"] = stale(batch["old_log_probs"], batch)
    metrics = example.backward(example.DistributedDataParallel(model), batches)
    saved["metrics"] = combine(metrics, dist.group.WORLD)
    saved["gradients"] = {name: p.grad for name, p in model.named_parameters()}
    torch.save(saved, folder / f"{rank}.pt")


def test_packed_ddp_has_the_gradients_of_separate_sequences_in_one_batch(tmp_path: Path) -> None:
    run_ranks(packed_rank, 2, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    example = imported("packed_ddp")
    model, reference = packed_model(0).double(), packed_model(1).double()
    batch = example.pack(packed_sequences())
    starts = batch["cu_seqlens"][1:-1].tolist()

    def hidden(model: Any) -> torch.Tensor:
        """Run each sequence alone."""
        parts = batch["input_ids"].tensor_split(starts)
        return torch.cat([model.model(input_ids=part[None]).last_hidden_state[0] for part in parts])

    def loss(model: Any, **options: Any) -> Any:
        head = model.lm_head.weight, batch["target_ids"], batch["advantages"].double()
        layout = {name: batch[name] for name in ("mask", "cu_seqlens")}
        return gspo_reference_loss(hidden(model), *head, **layout, **options)

    plain = example.Objective()
    with torch.no_grad():
        old, ref = (loss(x, objective=plain).log_probs for x in (model, reference))
    for name, expected in (("old_log_probs", old), ("ref_log_probs", ref)):
        packed = torch.cat([rank[name] for rank in ranks])
        torch.testing.assert_close(packed.double(), expected, rtol=0, atol=TRAINER_ABSOLUTE)
    loss(model, old_log_probs=stale(old, batch), ref_log_probs=ref, objective=example.OBJECTIVE).loss.backward()
    truth = torch.cat([p.grad.flatten() for p in model.parameters()])
    for rank in ranks:
        gradients = torch.cat([rank["gradients"][name].flatten() for name, _ in model.named_parameters()])
        assert (gradients - truth).norm() < MODEL_GRADIENT_RELATIVE[torch.float32] * truth.norm()
        assert rank["metrics"]["sequences"] == 6
        assert rank["metrics"]["clip_fraction"].item() == pytest.approx(4 / 6)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_packed_sequences_do_not_attend_to_each_other(attention: str) -> None:
    example = imported("packed_ddp")
    model = packed_model(0)
    example.fuse_head(model)
    model.set_attn_implementation(attention)

    def log_probs(sequences: list[Any]) -> torch.Tensor:
        return example.at_head(model, example.pack(sequences), example.linear_log_probs).log_probs

    alone = torch.cat([log_probs([x]) for x in packed_sequences()])
    torch.testing.assert_close(log_probs(packed_sequences()), alone, rtol=0, atol=TRAINER_ABSOLUTE)


@needs_megatron
def test_megatron_tp(tmp_path: Path) -> None:
    output = run(tmp_path, "megatron_tp.py", "--steps", 21, processes=2)
    rewards = numbers("reward", output)
    assert rewards[-1] > rewards[0] + 0.1
    assert max(numbers(r"update 0\.00,", output)) > 0.05
    assert all(f"rank {rank}: head 7x64 of 13x64" in output for rank in range(2))


@needs_notebooks
def test_the_notebook(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    path = EXAMPLES / "gspo_idea.ipynb"
    assert path.stat().st_size < 300_000
    committed = nbformat.read(path, 4)
    notebook = nbformat.read(path, 4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    for text in (printed(committed), printed(notebook)):
        wrong = {name: int(flips) for name, flips in re.findall(r"(\w[\w ]*): (\d+) of 64 decisions", text)}
        assert wrong["bf16 logits"] > 6 and wrong["gspo_kernels"] == 0
        memory = re.findall(r"151,936: +(\d+) MiB with logits, +(\d+) MiB fused", text)
        assert int(memory[0][0]) > 4 * int(memory[0][1])
        passes = float(re.findall(r"([\d.]+) passes", text)[0])
        assert 1 < passes < 4
    figures = [x for cell in committed.cells for x in cell.get("outputs", []) if "image/png" in x.get("data", {})]
    assert len(figures) == 2
    assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text())


def printed(notebook: Any) -> str:
    """Return what the cells printed."""
    outputs = [x for cell in notebook.cells for x in cell.get("outputs", [])]
    return "".join(x["text"] for x in outputs if x["output_type"] == "stream")


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = [x.relative_to(EXAMPLES).as_posix() for x in EXAMPLES.rglob("*.*") if x.name != "README.md"]
    files = [name for name in files if "__pycache__" not in name]
    assert sorted(re.findall(r"^\| \[`([\w./]+)`\]\(\1\) \|", page, re.MULTILINE)) == sorted(files)
