"""What a model's config.json and generation_config.json say about its answers. Pure.

Multimodal models keep the numbers of their language model in `text_config`.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """The number of token ids; None if the config has no readable one."""
    return _positive(config, ("vocab_size",))


def context_max(config: Mapping[str, Any]) -> int | None:
    """The most tokens of prompt and answer together; None if the config does not say it."""
    return _positive(config, ("max_position_embeddings", "n_positions", "max_seq_len"))


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
