"""Ranks that are forks of the test's process, so that a start needs no import of torch."""

import multiprocessing
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

END_S = 60.0
KILLED = "killed"


def outcomes_of(call: Callable[[int], str], ranks: int, folder: Path) -> list[str]:
    """Call `call` with its rank in each of some processes, which can reach each other through gloo.

    Returns for each rank what `call` returned, or its exception in one line, or KILLED.
    """
    if dist.is_initialized():
        # A learner of an earlier test began a group of its own, which a fork would inherit.
        dist.destroy_process_group()
    fork = multiprocessing.get_context("fork")
    meeting = folder / secrets.token_hex(4)

    def run(rank: int) -> None:
        try:
            store = FileStore(str(meeting), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            line = call(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            line = f"{type(error).__name__}: {error}"
        meeting.with_name(f"{meeting.name}-{rank}").write_text(line)
        # Without Python's shutdown, in which gloo's threads abort the process.
        os._exit(0)

    processes = [fork.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(END_S)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"rank {processes.index(process)} has not ended after {END_S:g} s")
    said = [meeting.with_name(f"{meeting.name}-{rank}") for rank in range(ranks)]
    return [each.read_text() if each.exists() else KILLED for each in said]
