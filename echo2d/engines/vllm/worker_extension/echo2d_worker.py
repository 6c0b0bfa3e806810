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
    # From where the weights are; None: from where vLLM took them at its start; empty: a load failed halfway.
    _echo2d_directory: str | None = None

    def echo2d_state(self) -> dict[str, Any]:
        """From where the weights are, and with which settings the server runs."""
        config, directory = self.vllm_config, self._echo2d_directory
        return {
            "directory": str(config.model_config.model) if directory is None else directory,
            "quantization": str(config.model_config.quantization or ""),
            "kv_dtype": str(config.cache_config.cache_dtype),
            "context": config.model_config.max_model_len,
            "running_max": config.scheduler_config.max_num_seqs,
            "adapters_max": config.lora_config.max_loras if config.lora_config else 0,
            # It has a sampler of its own, which `_whole_logprobs` does not change.
            "new_runner": bool(config.use_v2_model_runner),
            # So have drafts: their logprobs are those of the distribution that top_p and top_k have cut.
            "drafts": config.speculative_config is not None,
            "logprobs": str(config.model_config.logprobs_mode),
        }

    def echo2d_load(self, directory: str, files: str) -> dict[str, Any]:
        """Load these files of the directory, a name on each line.

        RuntimeError: a load failed halfway before. vLLM's layers then wait for the rest of it, and would take words of
        two versions.
        """
        if self._echo2d_directory == "":
            raise RuntimeError("a load failed halfway: restart this server")
        self._echo2d_directory = ""
        paths = [Path(directory) / name for name in files.split("\n")]
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=_tensors(paths))
        self._echo2d_directory = directory
        return self.echo2d_state()

    def echo2d_memory(self) -> None:
        """Do what was ordered by the socket (`echo2d_memory`)."""
        with set_current_vllm_config(self.vllm_config):
            done = echo2d_memory.in_scheduler(self.model_runner.model)
        if self._echo2d_directory != "":
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
