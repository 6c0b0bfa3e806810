"""Seed the random number generators of a learner process, and save and restore their states."""

import random
from typing import Any

import numpy as np
import torch


def seed(rng_seed: int) -> None:
    """Seed Python, numpy and torch, CUDA included."""
    random.seed(rng_seed)
    np.random.seed(rng_seed % (1 << 32))
    torch.manual_seed(rng_seed)


def state() -> dict[str, Any]:
    """Return the states as values and tensors that `torch.load(weights_only=True)` accepts."""
    facts = np.random.get_state(legacy=False)
    # torch has no uint32 arithmetic, and a checkpoint holds no numpy arrays.
    key = torch.from_numpy(facts["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**facts, "state": {**facts["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(kept: dict[str, Any]) -> None:
    """Restore what `state` returned. With another number of GPUs, their generators stay as they
    are.
    """
    random.setstate(kept["python"])
    facts = kept["numpy"]
    key = facts["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**facts, "state": {**facts["state"], "key": key}})
    torch.set_rng_state(kept["torch"])
    if torch.cuda.is_available() and len(kept["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(kept["cuda"])
