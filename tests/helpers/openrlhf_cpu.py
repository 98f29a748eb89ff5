"""Let OpenRLHF's `train_ppo_ray` run on a CPU and without vLLM. main() runs a script that starts it.

OpenRLHF's command line, trainer, experience maker, replay buffer, actor and DeepSpeed run unchanged in Ray's workers.
We replace the sampling of answers, the writer of the logs, and what needs a GPU.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

STUBS: dict[str, list[str]] = {  # packages for GPUs, and the names that OpenRLHF imports from them
    "vllm": ["SamplingParams"],
    "vllm.inputs": ["TokensPrompt"],
    "vllm.utils": ["random_uuid"],
    "flash_attn.bert_padding": ["index_first_axis", "pad_input", "rearrange", "unpad_input"],
    "flash_attn.utils.distributed": ["all_gather"],
}
VARIABLES = ("TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS")  # train_ppo_ray sets them


class Device(str):
    """The name "cpu", to which tensors can be moved. In f"cuda:{device}" it is 0, so that torch accepts the name."""

    def __format__(self, specification: str) -> str:
        return "0"


def prepare() -> None:
    """Replace what needs a GPU in this process. Ray calls this function when it starts a worker."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it on import
    torch.set_num_threads(1)
    for path, names in STUBS.items():
        module = ModuleType(path)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None)
        vars(module).update(dict.fromkeys(names), __version__="0.29.0")
        sys.modules[path] = module
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.current_device = lambda: Device("cpu")  # type: ignore[method-assign,return-value]

    import deepspeed
    import openrlhf.utils.utils
    from openrlhf.trainer import ppo_trainer

    initialize = deepspeed.initialize

    def in_fp32(*arguments: Any, config: dict[str, Any], **options: Any) -> Any:
        config["bf16"]["enabled"] = False
        config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed would compile an Adam for CPUs
        return initialize(*arguments, config=config, **options)

    deepspeed.initialize = in_fp32
    openrlhf.utils.utils.convert_to_torch_dtype = lambda _: torch.float32
    ppo_trainer.SamplesGenerator = Samples
    ppo_trainer.TensorboardLogger = Log


class Samples:
    """Two rollouts of random answers with random rewards, in place of OpenRLHF's SamplesGenerator.

    The engine's log-probs are those of the initial weights, with noise.
    """

    def __init__(self, strategy: Any, **options: Any) -> None:
        self.args = strategy.args
        path = self.args.actor.model_name_or_path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.rollouts = 0

    def generate_samples(self, **options: Any) -> tuple[list[Any], None, int, bool]:
        generator = torch.Generator().manual_seed(self.rollouts)
        number = self.args.rollout.batch_size * self.args.rollout.n_samples_per_prompt
        samples = [self._sample(generator) for _ in range(number)]
        self.rollouts += 1
        return samples, None, self.args.rollout.batch_size, self.rollouts == 2

    def _sample(self, generator: torch.Generator, prompt: int = 5) -> Any:
        from openrlhf.trainer.ppo_utils.experience import Experience

        answer = int(torch.randint(1, 12, (), generator=generator))
        ids = torch.randint(3, 259, (1, prompt + answer), generator=generator)
        with torch.no_grad():
            log_probs = self.model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        reward = torch.randn(1, generator=generator)
        return Experience(
            sequences=ids,
            attention_mask=torch.ones_like(ids),
            action_mask=(torch.arange(1, prompt + answer)[None] >= prompt).long(),
            rollout_log_probs=log_probs + 1e-3 * torch.randn(log_probs.shape, generator=generator),
            rewards=reward,
            scores=reward,
            response_length=torch.tensor([answer]),
            truncated=torch.tensor([False]),
            total_length=torch.tensor([prompt + answer]),
            info={"reward": reward},
        )


class Log:
    """A JSON line per rollout, in place of OpenRLHF's TensorboardLogger: its numbers, and the worker's environment."""

    def __init__(self, args: Any) -> None:
        self.path = Path(args.logger.tensorboard_dir)

    def log_train(self, global_step: int, logs: dict[str, Any]) -> None:
        numbers = {name: x for name, x in logs.items() if isinstance(x, float)}
        record = {"numbers": numbers, "environment": {name: os.environ.get(name) for name in VARIABLES}}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def close(self) -> None: ...


def main() -> None:
    """Run the script sys.argv[1] with the arguments that follow it."""
    prepare()
    import ray

    init = ray.init

    def with_gpu(runtime_env: dict[str, Any], **options: Any) -> Any:
        """Start Ray with `prepare` in every worker, and with a GPU that does not exist."""
        runtime_env = {**runtime_env, "worker_process_setup_hook": f"{__name__}.prepare"}
        return init(runtime_env=runtime_env, num_cpus=2, num_gpus=1, object_store_memory=2**27, **options)

    ray.init = with_gpu
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
