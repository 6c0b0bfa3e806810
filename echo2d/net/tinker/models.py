"""What the Tinker API says of the models that it serves. Importable without protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The names of the base model, and facts about it."""

    names: Sequence[str]
    context_max: (
        int  # the most tokens of a datum, or of a prompt and its answer; 0: the model does not say
    )
    vocab_size: int
    end_token_ids: tuple[int, ...]
