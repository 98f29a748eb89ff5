"""Time the Triton kernels on this machine's GPU, and rank block shapes by speed.

    python -m gspo_kernels.benchmarks gpu --times             time the loss and its kernels; for comparison also a copy,
                                                              the vendor's matrix products and the loss on full logits
    python -m gspo_kernels.benchmarks gpu --tune --minutes 8  rank block shapes

Results are saved to a JSON file after each measurement and printed at the end. The exit status is 1 if one failed.
A dry run: `TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --times --tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import gc
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
    parser.add_argument("--times", action="store_true", help="time the loss, its kernels, and comparisons")
    parser.add_argument("--tune", action="store_true", help="rank the kernels' block shapes by speed")
    parser.add_argument("--minutes", type=float, default=8.0, help="total minutes of --tune (default 8)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 896], help="H for --tune (default 4096 896)")
    parser.add_argument("--device", type=device_of, default="cuda", help="cuda, or cpu for a dry run (default cuda)")
    options = parser.parse_args()
    if not (options.times or options.tune):
        parser.error("nothing to do: give --times or --tune")
    if obstacle := triton_obstacle(options.device):
        parser.error(obstacle)
    return options


def measured(name: str, measurement: Callable[[], list[Record]]) -> Record:
    """Run a measurement and return its record. If the measurement raises, the record holds the traceback as `fault`."""
    start = time.monotonic()
    record: Record = {"name": name, "results": [], "fault": ""}
    try:
        record["results"] = measurement()
    except Exception:  # any error: later measurements still run, and the JSON file holds the traceback
        record["fault"] = traceback.format_exc(limit=-6)
    record["seconds"] = time.monotonic() - start
    print(f"{record['seconds']:6.1f} s  {name}  {record['fault']}", flush=True)
    gc.collect()
    if torch.cuda.is_available() and not record["fault"]:
        torch.cuda.empty_cache()  # the next measurement may need memory outside PyTorch's allocator
    return record


def properties_of(device: torch.device) -> Record:
    """Return the GPU's name, properties, driver version, clocks and power limit."""
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
    """Print the measured times, and the ten fastest block shapes of each kernel and hidden size."""
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
            print(f"  {shape_text(r['config']):44}{r['ms']:9.3f} ms {r['TFLOP/s']:6.0f} TFLOP/s")
