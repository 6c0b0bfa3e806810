"""Warns about settings of a config that are allowed and yet probably a mistake. Pure.

`init`, `try`, `coordinate`, `doctor` and `learn --plan` call this module, so all of them give the same warnings.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.run import leads_a_run
from echo2d.core.base.model_config import ExpertNumbers, context_max, expert_numbers
from echo2d.core.protocol.columns import ANSWER_BYTES_MAX, TOKEN_BYTES
from echo2d.core.protocol.experts import EXPERTS

# A score on fewer held-out questions says little.
HELD_OUT_FEW = 30


def config_cautions(
    config: CoordinatorConfig, model: Mapping[str, Any], held_out: Mapping[str, int | None]
) -> list[str]:
    """The warnings about a config.

    model: its config.json; empty: not known. held_out: questions of each [[eval]]; None: not known.
    """
    cautions, context = [], context_max(model)
    for task in config.tasks:
        most = config.sampling_of(task).max_new_tokens
        if EXPERTS in config.policy.columns and model:
            cautions += _experts_caution(most, expert_numbers(model))
        if context is not None and most >= context:
            cautions.append(
                f"sampling.max_new_tokens: an answer may have {most} tokens, but the model reads {context} tokens of "
                "prompt and answer together, so long answers are cut off there"
            )
    few = {
        name: each for name, each in held_out.items() if each is not None and each < HELD_OUT_FEW
    }
    if few:
        cautions.append(
            f"eval {', '.join(few)}: with {min(few.values())} questions a score is hardly more than chance; "
            f"take {HELD_OUT_FEW} or more (task.options.held_out, or a file of their own)"
        )
    return list(dict.fromkeys(cautions))


def _experts_caution(tokens: int, numbers: ExpertNumbers | None) -> list[str]:
    """The warning if answers of this many tokens would come without their experts."""
    if numbers is None:
        return [
            'policy.columns: "experts" changes nothing, because the model is no mixture of experts'
        ]
    most = ANSWER_BYTES_MAX // (TOKEN_BYTES + numbers.token_bytes)
    size = f"{numbers.token_bytes} bytes a token, {ANSWER_BYTES_MAX >> 20} MiB an answer"
    caution = (
        f"policy.columns: answers of more than {most} tokens come without their experts ({size})"
    )
    return [f"{caution}; sampling.max_new_tokens allows {tokens}"] if tokens > most else []


def answer_tokens(path: Path, settings: Iterable[str]) -> int:
    """The most tokens of one answer to the tasks of a learner's file; 0: the file has no [run] table.

    Not known here: which tasks are environments. Their episodes may have task.episode_tokens.
    """
    if not leads_a_run(path):
        return 0
    config = CoordinatorConfig.load(path, settings)
    return max((config.sampling_of(task).max_new_tokens for task in config.tasks), default=0)


def file_cautions(path: Path, settings: Iterable[str], model: Mapping[str, Any]) -> list[str]:
    """The warnings about a learner's file; none without a [run] table, because it says nothing about answers."""
    if not leads_a_run(path):
        return []
    return config_cautions(CoordinatorConfig.load(path, settings), model, {})
