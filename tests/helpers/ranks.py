"""Run a function on several CPU processes that communicate through gloo."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_folders: list[Iterator[Path]] = []  # one iterator in a rank, empty elsewhere
_stores: list[dist.TCPStore] = []  # which rank 0 must keep


def run_ranks(
    main: Callable[..., None], ranks: int, folder: Path, *args: Any, deadline: float = 240.0, imported: str = ""
) -> None:
    """Run main(rank, folder, *args) in new processes, with the environment variables that `init_process_group` reads.

    An exception in a rank is raised in the caller. The test fails if the ranks take longer than `deadline` seconds.
    By default, ranks are spawned. If `imported` names a module, ranks are forked from a server process that imported it
    once, so they do not wait for that import. The test process has only one such server: the first call that names a
    module decides what it imports. If GSPO_TEST_START is "fork", ranks are forked from the caller, which must not have
    threads.
    """
    if imported:
        multiprocessing.set_forkserver_preload([imported])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)  # for the server
        started: Any = mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            _run,
            args=(main, ranks, folder, args),
            nprocs=ranks,
            start_method=os.environ.get("GSPO_TEST_START", "forkserver" if imported else "spawn"),
            join=False,
        )
    end = time.monotonic() + deadline
    while not started.join(timeout=1):  # `join` raises the exception of a rank
        if time.monotonic() > end:
            for process in started.processes:
                process.kill()
            pytest.fail("a rank hangs")


def meet() -> None:
    """Make the next `init_process_group` meet at a new store. All ranks call this. Outside `run_ranks`, do nothing.

    The system chooses the port, and rank 0 listens there before the other ranks learn it, so no process can take it.
    """
    if not _folders:
        return
    folder, rank = next(_folders[0]), os.environ["RANK"]
    if rank == "0":
        folder.mkdir()
        _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        (folder / "unfinished").write_text(str(_stores[-1].port))
        (folder / "unfinished").rename(folder / "port")
    while not (folder / "port").exists():  # `run_ranks` has a deadline
        time.sleep(0.01)
    port = (folder / "port").read_text()
    # With the last variable, rank 0 connects to the store, and does not open one at the same port.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")


def _run(rank: int, main: Callable[..., None], ranks: int, folder: Path, args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    _folders.append(folder / f"meeting-{i}" for i in itertools.count())
    meet()
    torch.set_num_threads(int(os.environ.get("GSPO_TEST_THREADS", "1")))
    main(rank, folder, *args)
    # Gloo's threads may deadlock during an orderly shutdown, so exit abruptly once all ranks are done.
    (folder / f"done-{rank}").touch()
    while len(list(folder.glob("done-*"))) < ranks:
        time.sleep(0.02)
    os._exit(0)
