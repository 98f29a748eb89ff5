"""Register the CPU as a platform of verl, so that verl's FSDP engines and worker run without a GPU.

verl imports the modules named in the environment variable VERL_USE_EXTERNAL_MODULES. `verl_worker.py` names this one.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _module() -> Any:
    """Return torch.cpu with the functions of torch.cuda that verl calls.

    The functions that measure memory return constants. The functions that set or synchronise a device do nothing.
    """
    module = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"})
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_: 0)
    for name in ("empty_cache", "reset_peak_memory_stats", "manual_seed", "set_device", "synchronize"):
        setattr(module, name, lambda *_: None)
    module.mem_get_info = lambda *_: (1 << 34, 1 << 34)
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda *_: "cpu"
    module.device_count = lambda: 1
    module.is_available = lambda: False
    return module


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def get_device_uuid(self, device_id: Any) -> str:
        return "cpu"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...

    def rollout_env_vars(self) -> dict[str, str]:
        return {}


def let_fsdp1_run() -> None:
    """Disable FSDP1's broadcast of parameters: it fails on a CPU, and all ranks load the same file anyway."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from verl.workers.engine.fsdp import transformer_impl

    class Unbroadcast(FullyShardedDataParallel):
        def __init__(self, module: Any, **options: Any) -> None:
            options |= {"sync_module_states": False, "device_id": torch.device("cpu")}
            super().__init__(module, **options)

    transformer_impl.FSDP = Unbroadcast
