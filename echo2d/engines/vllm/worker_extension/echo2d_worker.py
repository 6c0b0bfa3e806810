"""Methods that vLLM adds to each of its worker processes (`--worker-extension-cls echo2d_worker.Echo2dWorker`).

This file stands alone: the environment of the server has no echo2d. Arguments are paths and names, never serialized
objects.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import echo2d_memory
import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.v1.sample.sampler import Sampler


class Echo2dWorker:
    """vLLM's worker has these methods too."""

    vllm_config: Any
    model_runner: Any
    _echo2d_directory = ""

    def echo2d_state(self) -> dict[str, str]:
        """From where the weights are."""
        return {"directory": self._echo2d_directory or str(self.vllm_config.model_config.model)}

    def echo2d_load(self, directory: str, files: str) -> dict[str, str]:
        """Load these files of the directory, a name on each line."""
        paths = [Path(directory) / name for name in files.split("\n")]
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=_tensors(paths))
        self._echo2d_directory = directory
        return self.echo2d_state()

    def echo2d_memory(self) -> None:
        """Do what was ordered by the socket (`echo2d_memory`)."""
        with set_current_vllm_config(self.vllm_config):
            done = echo2d_memory.in_scheduler(self.model_runner.model)
        self._echo2d_directory = done.get("done", self._echo2d_directory)


def _tensors(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is not a mapping
                yield name, file.get_tensor(name)


def _whole_logprobs() -> None:
    """Have the sampler give the logprobs of the whole distribution at the request's temperature, before top_p, top_k
    and min_p cut it.
    """
    heated: list[torch.Tensor] = []
    divide, draw = Sampler.apply_temperature, Sampler.sample

    def apply_temperature(logits: torch.Tensor, *args: Any) -> torch.Tensor:
        found: torch.Tensor = divide(logits, *args)
        heated[:] = [found.log_softmax(dim=-1, dtype=torch.float32)]
        return found

    def sample(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        heated.clear()
        drawn, logprobs = draw(self, *args, **kwargs)
        return drawn, logprobs if logprobs is None or not heated else heated.pop()

    Sampler.apply_temperature = staticmethod(apply_temperature)
    Sampler.sample = sample


_whole_logprobs()
