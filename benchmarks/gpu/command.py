"""Time the kernels on the GPU at hand, and rank block shapes.

    python -m gspo_kernels.benchmarks gpu --times             beside a copy, the vendor's products and full logits
    python -m gspo_kernels.benchmarks gpu --tune --minutes 8  rank block shapes

The JSON file is written anew after every result; a short table comes last. The exit status is 1 if a measurement
failed. This is a dry run without a GPU, with interpreted kernels:
`TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --times --tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import time
import traceback
from collections.abc import Callable

import torch

from gspo_kernels.backends.dispatch import triton_obstacle

from ..measure import destination, save
from ..suites.options import device_of, parser_of
from .times import Record, Setting, times, tiny
from .tune import KERNELS, shape_text, tune


def main() -> int:
    options = parsed()
    setting = tiny(options.device) if options.tiny else Setting(options.device)
    path = destination("gpu", options.device, options.output, options.tiny)
    results: Record = {"gpu": properties_of(options.device), "times": [], "tuning": []}

    def add(part: str, records: list[Record]) -> None:
        results[part] += records
        save("gpu", options.device, results, path)

    if options.times:
        for name, measurement in times(setting):
            add("times", [measured(name, measurement)])
    if options.tune:
        pairs = [(width, kernel) for width in options.widths for kernel in KERNELS]
        for width, kernel in pairs:
            add("tuning", tune(setting, kernel, width, options.minutes / len(pairs)))
    print_table(results)
    failed = any(record["fault"] for record in results["times"])
    print(f"{path}: {'FAILED' if failed else 'complete'}")
    return int(failed)


def parsed() -> argparse.Namespace:
    """Return the command line's options; exit with a line on stderr for bad ones."""
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--times", action="store_true", help="time passes, kernels and their ceilings")
    parser.add_argument("--tune", action="store_true", help="rank block shapes")
    parser.add_argument("--minutes", type=float, default=8.0, help="for --tune altogether (default 8)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 896], help="H, for --tune (default 4096 896)")
    parser.add_argument("--device", type=device_of, default="cuda", help="cuda, or cpu for a dry run (default cuda)")
    options = parser.parse_args()
    if not (options.times or options.tune):
        parser.error("nothing to do: give --times or --tune")
    if obstacle := triton_obstacle(options.device):
        parser.error(obstacle)
    return options


def measured(name: str, measurement: Callable[[], list[Record]]) -> Record:
    """Return the record of a measurement. If it raises, the record has a fault, and the other measurements follow."""
    start = time.monotonic()
    record: Record = {"name": name, "results": [], "fault": ""}
    try:
        record["results"] = measurement()
    except Exception:  # of any kind: the file gets its message and frames
        record["fault"] = traceback.format_exc(limit=-6)
    record["seconds"] = time.monotonic() - start
    print(f"{record['seconds']:6.1f} s  {name}  {record['fault']}", flush=True)
    gc.collect()
    if torch.cuda.is_available() and not record["fault"]:
        torch.cuda.empty_cache()  # memory outside PyTorch's allocator is needed too
    return record


def properties_of(device: torch.device) -> Record:
    """Return what the speed of a GPU depends on."""
    if device.type != "cuda":
        return {"name": "cpu, interpreted"}
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        clocks = None
    return {"name": properties.name, "properties": str(properties), "driver, clocks and power limit": clocks}


def print_table(results: Record) -> None:
    """Print times, and the ranking of block shapes."""
    for record in results["times"]:
        print(f"\n{record['name']}: {'FAILED' if record['fault'] else ''}")
        for r in record["results"]:
            ms = "does not fit" if r["ms"] is None else f"{r['ms']:10.3f} ms"
            numbers = [f"{r[k]:.4g} {k}" for k in ("TFLOP/s", "TB/s", "vendor share", "peak GiB") if k in r]
            print(f"  {r['what']:34}{ms}  {', '.join(numbers)}")
    for kernel, width in dict.fromkeys((r["kernel"], r["width"]) for r in results["tuning"]):
        records = [r for r in results["tuning"] if (r["kernel"], r["width"]) == (kernel, width)]
        works = [r for r in records if r["fault"] is None]
        print(f"\n{kernel} H={width}, fastest first; {len(records) - len(works)} of {len(records)} do not work")
        for r in works[:10]:
            entropy = f", with entropy {r['with entropy'].get('ms', math.nan):.3f} ms" if "with entropy" in r else ""
            print(f"  {shape_text(r['config']):44}{r['ms']:9.3f} ms {r['TFLOP/s']:6.0f} TFLOP/s{entropy}")
