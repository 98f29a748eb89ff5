"""Block shapes of kernels: a fixed table per architecture, keyed by kernel, dtype, H and options of the head, not by N.

Because N is not a key, a row's log-prob has the same bits in any batch, and the first importance ratio of an update is
exactly 1. For the same reason, forward tiles have the same shape with and without entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..rows import HeadRows

# Architectures that borrow the block shapes of another architecture.
SAME_AS = {"sm_103": "sm_100", "sm_120": "sm_89", "gfx950": "gfx942"}
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", *SAME_AS)
# Shared memory that one block may use, in bytes.
SHARED_MEMORY = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
SHARED_MEMORY |= {name: SHARED_MEMORY[other] for name, other in SAME_AS.items()} | {"gfx950": 163_840}


@dataclass(frozen=True)
class Config:
    """The block shape and launch options of a kernel."""

    block_n: int  # rows
    block_v: int = 0  # vocabulary columns
    block_h: int = 0  # elements of the hidden dimension at a time
    warps: int = 4
    stages: int = 1
    group: int = 8  # row blocks that share a sweep over the columns
    block_r: int = 16  # elements of an adapter's rank at a time
    chain: int = 0  # elements of H in each partial sum, without tensor cores; 0: a single sum
    descriptors: bool = False  # load operands with the tensor memory accelerator


class _Blocks(NamedTuple):
    """Block shapes of the tile kernels; "heavy" as in `tile_config`."""

    forward: Config
    gradient: Config
    heavy_forward: Config
    heavy_gradient: Config


def _ampere(stages: int) -> _Blocks:
    wide, narrow = Config(128, 128, 32, 8, stages), Config(64, 128, 32, 8, stages)
    return _Blocks(wide, wide, wide, narrow)


_HOPPER = _Blocks(
    Config(128, 256, 64, 8, 4, descriptors=True),
    Config(128, 256, 64, 8, 4, descriptors=True),
    Config(128, 128, 64, 8, 4, descriptors=True),
    Config(64, 128, 64, 8, 4, descriptors=True),
)
# Chosen so that no registers spill and the architecture's matrix instructions are used. In bf16 on an H200, no other
# shape was faster by more than 4 % (forward at H = 4,096 and 896, gradient at 4,096; benchmarks/NOTES.md). On other
# GPUs, the speed has not been measured.
_HALF = {
    "sm_80": _ampere(stages=4),
    "sm_89": _ampere(stages=3),
    "sm_90": _HOPPER,
    "sm_100": _HOPPER,
    "gfx942": _Blocks(
        Config(128, 256, 64, 8, 2), Config(128, 256, 64, 8, 2), Config(128, 128, 64, 8, 2), Config(128, 128, 32, 8, 2)
    ),
}
_HALF |= {name: _HALF[other] for name, other in SAME_AS.items()}
_SINGLE = dict.fromkeys(ARCHITECTURES, _Blocks(*[Config(64, 128, 32, 8, 2, chain=256)] * 4))
_SINGLE["sm_80"] = _Blocks(*[Config(64, 128, 16, 8, 2, chain=256)] * 4)
_DOUBLE = dict.fromkeys(ARCHITECTURES, _Blocks(*[Config(64, 64, 16, 8, 2)] * 4))
_DOUBLE["sm_103"] = _Blocks(*[Config(32, 64, 16, 8, 2)] * 4)

# Block-sparse products, by bytes per element: rows and columns of the result, and elements summed at a time.
_PRODUCT = {2: Config(128, 128, 64, 8, 3), 4: Config(64, 64, 32, 8, 2), 8: Config(32, 64, 16, 8, 2)}
# Where these shapes would spill: in fp64 with Triton 3.6.0, in fp32 with 3.7.1.
_PRODUCT_ON = {(8, name): Config(64, 64, 16, 8, 2) for name in ("sm_89", "sm_120")}
_PRODUCT_ON |= {(4, name): Config(32, 64, 32, 8, 2) for name in ("sm_100", "sm_103")}
_AMD_STAGES = 2  # with three, Triton 3.9.0 fails to compile the products for gfx950

CACHED_STEP = 64  # columns that `cached_tile` computes at a time
REDUCE_ROWS = Config(block_n=64, warps=4)
REDUCE_TILES = 32  # tiles added up at a time
# block_n: tokens of a sequence that the kernels of the loss process at a time.
_SEQUENCE, _DOUBLE_SEQUENCE = Config(block_n=256, warps=4), Config(block_n=128, warps=4)
# Kernels of (row, id) pairs: block_n pairs and block_h elements of H at a time. Of 26 shapes in bf16 on an H200, none
# was faster by more than 15 % for sets of 8 and of 64 ids (benchmarks/NOTES.md).
_PAIR_PRODUCTS, _PAIR_SUMS = Config(block_n=4, block_h=256, warps=4), Config(block_n=4, block_h=1024, warps=4)
LIST = Config(block_n=1024, warps=4)  # block_n: cells that one program lists

_assumed: str | None = None


@contextmanager
def assume(architecture: str) -> Iterator[None]:
    """Use the block shapes of `architecture` on any device, for compilation without a GPU and for tests."""
    global _assumed
    before, _assumed = _assumed, architecture
    try:
        yield
    finally:
        _assumed = before


def architecture(device: torch.device) -> str | None:
    """Name of the block shapes that a device uses; None if the kernels do not run there.

    On a CPU, interpreted kernels use Hopper's block shapes.
    """
    if _assumed is not None:
        return _assumed
    if device.type == "cpu":
        return "sm_90"
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return name if name in ("gfx942", "gfx950") else None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return None
    exact = {(8, 0): "sm_80", (10, 0): "sm_100"}
    family = {8: "sm_89", 9: "sm_90", 10: "sm_103"}
    return exact.get(capability) or family.get(capability[0], "sm_120")  # major versions 11 and later


def is_amd(device: torch.device) -> bool:
    """True if a device uses the block shapes of an AMD GPU."""
    return (architecture(device) or "").startswith("gfx")


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; for other devices 132, as on an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def product_config(dtype: torch.dtype, device: torch.device) -> Config:
    """Block shape of block-sparse products: block_v elements of H, and block_h elements summed at a time."""
    size = dtype.itemsize
    config = _PRODUCT_ON.get((size, architecture(device) or "")) or _PRODUCT[size]
    return replace(config, stages=_AMD_STAGES) if is_amd(device) else config


def pair_config(kernel: str, dtype: torch.dtype) -> Config:
    """Config of "products" or "sums" of (row, id) pairs, with sums in `dtype`."""
    config = _PAIR_SUMS if kernel == "sums" else _PAIR_PRODUCTS
    return replace(config, block_h=config.block_h // 2) if dtype == torch.float64 else config


def sequence_config(dtype: torch.dtype) -> Config:
    """Config of the loss kernels for log-probs of `dtype`. Here block_n counts tokens processed at a time."""
    return _DOUBLE_SEQUENCE if dtype == torch.float64 else _SEQUENCE


def tile_config(head: HeadRows, kernel: str) -> Config:
    """Block shape of "forward" or "gradient" tiles.

    Heavy heads get smaller tiles, because they need more registers. A head is heavy if it has a bias, a soft-cap or an
    adapter, or if H is not a multiple of block_h, which leaves a ragged end in the main loop.
    """
    name = architecture(head.hidden.device)
    assert name is not None
    blocks = {2: _HALF, 4: _SINGLE, 8: _DOUBLE}[head.kernel_dtype.itemsize][name]
    has_extras = head.bias is not None or head.logit_softcap is not None or head.adapter_weight is not None
    heavy = has_extras or head.hidden.shape[1] % blocks.forward.block_h != 0
    return getattr(blocks, f"heavy_{kernel}" if heavy else kernel)
