"""The [learner] table of the run's TOML file; the other tables belong to other programs and are ignored.

Staleness bound, publish period, trajectories per step and group size are the coordinator's, and come with the session.
Relative paths count from the working directory. Anything wrong is an OperatorFault that names the key.
"""

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echo2d.client import OperatorFault

_EXPECTED = {int: "an integer", float: "a number", str: "text", Path: "a path"}


def key(doc: str, default: Any, **limits: float) -> Any:
    """One optional key. Limits: `low` and `high` (inclusive), `above` (exclusive)."""
    return field(default=default, metadata={"doc": doc, **limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """What one learner needs to know; checked when it is made."""

    url: str = field(metadata={"doc": "the coordinator, http://HOST:PORT"})
    token_file: Path = field(metadata={"doc": "made by `echo2d token create NAME --role learner`"})
    model: Path = field(metadata={"doc": "base model: a Hugging Face directory with safetensors and a tokenizer"})
    snapshot_root: Path = field(
        metadata={"doc": "the coordinator's run.snapshot_root; versions are published from here"}
    )
    out_dir: Path = field(metadata={"doc": "metrics.jsonl and checkpoints/"})
    steps: int = field(metadata={"doc": "train until this step", "low": 1})

    objective: Literal["clip", "tis"] = key("clip: PPO's clip, ratios truncated; tis: only truncated", "clip")
    clip_eps_low: float = key("the clip drops negative tokens below 1 - this ratio", 0.2, above=0.0, high=1.0)
    clip_eps_high: float = key("the clip drops positive tokens above 1 + this ratio", 0.2, above=0.0)
    tis_cap: float = key("importance ratios are truncated here", 2.0, low=1.0)
    temperature: float = key("the coordinator's sampling.temperature", 1.0, above=0.0)

    lr: float = key("of AdamW, after the warm-up", 1e-6, above=0.0)
    warmup_steps: int = key("train steps of linear warm-up", 10, low=0)
    betas: tuple[float, float] = key("of AdamW", (0.9, 0.95), low=0.0, high=0.9999999)
    weight_decay: float = key("of AdamW", 0.0, low=0.0)
    grad_clip: float = key("the gradient's norm is clipped to this", 1.0, above=0.0)
    micro_batch_tokens: int = key("padded tokens of one forward and backward pass", 16384, low=1)
    rng_seed: int = key("of torch, for models with dropout", 0, low=0)

    device: str = key("auto, cpu, cuda or cuda:N", "auto")
    threads: int = key("CPU threads of torch; 0: torch decides", 0, low=0, high=1024)
    checkpoint_every: int = key("train steps between checkpoints", 10, low=1)
    checkpoints_kept: int = key("older ones are deleted", 2, low=1)
    step_floor_s: float = key("a train step takes at least so long, to imitate a larger model", 0.0, low=0.0)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not (_matches(hints[item.name], value) and _in_range(value, item.metadata)):
                raise OperatorFault(
                    f"learner.{item.name}: expected {_expected(hints[item.name], item)}; found {value!r}"
                )

    @staticmethod
    def load(path: Path) -> "LearnerConfig":
        """From a TOML file."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise OperatorFault(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise OperatorFault(f"{path} is not TOML: {error}") from error
        table = document.get("learner")
        if not isinstance(table, dict):
            raise OperatorFault(f"{path}: expected a table [learner]; found {table!r}")
        return LearnerConfig.read(table)

    @staticmethod
    def read(table: Mapping[str, Any]) -> "LearnerConfig":
        """From the parsed table, in which paths are text and pairs are lists."""
        keys = {item.name: item for item in dataclasses.fields(LearnerConfig)}
        for name in table:
            if name not in keys:
                raise OperatorFault(f"learner.{name}: unknown key; expected one of {', '.join(keys)}")
        for name, item in keys.items():
            if name not in table and item.default is dataclasses.MISSING:
                raise OperatorFault(f"learner.{name}: expected {item.metadata['doc']}; found nothing")
        hints = typing.get_type_hints(LearnerConfig)
        return LearnerConfig(**{name: _from_toml(hints[name], value) for name, value in table.items()})


def _from_toml(hint: Any, value: Any) -> Any:
    if hint is Path and isinstance(value, str):
        return Path(value).expanduser()
    return tuple(value) if typing.get_origin(hint) is tuple and isinstance(value, list) else value


def _matches(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_matches, parts, value))
    if hint is float:
        return type(value) in (int, float)
    return isinstance(value, hint) and not isinstance(value, bool)


def _in_range(value: Any, limits: Mapping[str, Any]) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(
        ("low" not in limits or number >= limits["low"])
        and ("high" not in limits or number <= limits["high"])
        and ("above" not in limits or number > limits["above"])
        for number in values
    )


def _expected(hint: Any, item: "dataclasses.Field[Any]") -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    kind = "two numbers" if typing.get_origin(hint) is tuple else _EXPECTED[hint]
    words = {"above": "more than", "low": "at least", "high": "at most"}
    return ", ".join(
        [kind, *(f"{word} {item.metadata[name]}" for name, word in words.items() if name in item.metadata)]
    )
