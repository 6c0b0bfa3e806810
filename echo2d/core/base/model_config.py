"""What a model's config.json and generation_config.json say about its answers. Pure.

Multimodal models keep the numbers of their language model in `text_config`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """The number of token ids; None if the config has no readable one."""
    return _positive(config, ("vocab_size",))


def context_max(config: Mapping[str, Any]) -> int | None:
    """The most tokens of prompt and answer together; None if the config does not say it."""
    return _positive(config, ("max_position_embeddings", "n_positions", "max_seq_len"))


class ExpertNumbers(NamedTuple):
    """The experts of a mixture."""

    layers: int  # of the model
    chosen: int  # how many a layer chooses for a token
    experts: int  # of a layer

    @property
    def token_bytes(self) -> int:
        """The bytes of the column of experts for one token."""
        return self.layers * self.chosen * (1 if self.experts <= 1 << 8 else 2)


def expert_numbers(config: Mapping[str, Any]) -> ExpertNumbers | None:
    """What the config says about experts; None: the model is dense."""
    layers = _positive(config, ("num_hidden_layers",))
    chosen = _positive(config, ("num_experts_per_tok",))
    experts = _positive(config, ("num_experts", "num_local_experts", "n_routed_experts"))
    return ExpertNumbers(layers, chosen, experts) if layers and chosen and experts else None


def end_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """The tokens with which the model ends an answer, ascending.

    Those in generation_config.json, where chat models name all of them; else those in config.json.
    """
    named = () if generation is None else _ids(generation.get("eos_token_id"))
    return named or next(
        filter(None, (_ids(part.get("eos_token_id")) for part in _parts(config))), ()
    )


def _positive(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    found = (part.get(key) for part in _parts(config) for key in keys)
    return next((each for each in found if type(each) is int and each > 0), None)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    if isinstance(text := config.get("text_config"), Mapping):
        yield text


def _ids(found: object) -> tuple[int, ...]:
    """The ids, ascending. found: one id, a list of ids, or null."""
    listed = found if isinstance(found, list) else [found]
    return tuple(sorted({each for each in listed if type(each) is int and each >= 0}))
