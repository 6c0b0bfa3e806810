"""The random number generators of a learner process: seeded once, kept in checkpoints, brought back by them."""

import random
from typing import Any

import numpy as np
import torch


def seed(rng_seed: int) -> None:
    random.seed(rng_seed)
    np.random.seed(rng_seed % (1 << 32))
    torch.manual_seed(rng_seed)  # CUDA's too


def state() -> dict[str, Any]:
    """Of plain values and tensors: a checkpoint is read without unpickling anything else."""
    facts = np.random.get_state(legacy=False)
    key = torch.from_numpy(facts["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**facts, "state": {**facts["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(kept: dict[str, Any]) -> None:
    """What `state` gave. On other devices than then, CUDA's are left as they are."""
    random.setstate(kept["python"])
    facts = kept["numpy"]
    key = facts["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**facts, "state": {**facts["state"], "key": key}})
    torch.set_rng_state(kept["torch"])
    if torch.cuda.is_available() and len(kept["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(kept["cuda"])
