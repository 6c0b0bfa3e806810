"""The tables of tasks, of their evaluations, and of the sampling of their answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from echo2d.config.limits import NEW_TOKENS_MAX
from echo2d.core.rules.table import Table, key
from echo2d.registry import TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTable(Table):
    """How answers are drawn. A task may have its own values for some of these keys, in `task.sampling`."""

    TABLE: ClassVar[str] = "sampling"

    max_new_tokens: int = key("output tokens per trajectory", 1024, low=1, high=NEW_TOKENS_MAX)
    temperature: float = key(
        "temperature of the sampling distribution",
        1.0,
        low=0.0,
        high=10.0,
    )
    top_p: float = key(
        "draw from the likeliest tokens that together have this probability; 1.0: from all",
        1.0,
        above=0.0,
        high=1.0,
    )
    top_k: int = key("draw from this many of the likeliest tokens; 0: from all", 0, low=0)
    min_p: float = key(
        "draw from tokens whose probability is at least this share of the likeliest one's; 0.0: from all",
        0.0,
        low=0.0,
        high=0.999,
    )
    stop: tuple[str, ...] = key(
        "for tasks in text: texts that end an answer, at the token that completes one of them", ()
    )
    vocab_size: int = key(
        "every token id is below this; 0: read it from run.base_model", 0, low=0, high=1 << 24
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable(Table):
    """One [[task]]; a single task may be written as [task]."""

    TABLE: ClassVar[str] = "task"

    kind: str = key(f"a task of echo2d ({', '.join(TASKS)}), or your own as package.module:Class")
    name: str = key("name in metrics and trajectories; empty: the task's own name", "")
    weight: float = key(
        "with several tasks: this over the sum of all weights is the task's share of each step's groups",
        1.0,
        above=0.0,
        high=1e6,
    )
    groups_per_step: int = key(
        "with several tasks: exactly this many groups of each step, instead of weight", 0, low=0
    )
    sampling: dict[str, Any] = key("keys of [sampling] that differ for this task", dict)
    sampler: Literal["shuffle", "filter", "informative", "pairs"] = key(
        "shuffle: every row is asked once in an epoch; filter: rows whose rewards are all the same"
        " are retired for a while; informative: rows whose rewards differ less than those of the"
        " average row are asked rarely; pairs: every row gets 2 x group_size answers, and the half"
        " whose rewards contrast most is trained on",
        "shuffle",
    )
    explore: float = key(
        "with informative: how much the standard deviation of a row's rewards may have grown by the next version",
        0.01,
        low=0.0,
    )
    retire_after: int = key(
        "with filter: consecutive groups with equal rewards after which a row is retired", 1, low=1
    )
    retest_after: int = key(
        "with filter: versions after which a retired row is asked again", 100, low=1
    )
    options: dict[str, Any] = key(
        "keyword arguments of the task's class (`echo2d init --list-tasks`)", dict
    )
    system: str = key("the system message of each prompt of a task in text; empty: none", "")
    template: dict[str, Any] = key(
        "further variables of the model's chat template, such as enable_thinking", dict
    )
    turns_max: int = key(
        "for an environment: most answers of one episode; a longer episode is cut off and gets reward 0",
        16,
        low=1,
        high=1024,
    )
    episode_tokens: int = key(
        "for an environment: most tokens of one episode after its prompt, both written and given ones;"
        " max_new_tokens limits each answer",
        8192,
        low=1,
        high=NEW_TOKENS_MAX,
    )
    overlong_tokens: int = key(
        "each of this many tokens before max_new_tokens costs an equal share of overlong_penalty (DAPO's soft"
        " overlong punishment); 0: length costs nothing",
        0,
        low=0,
    )
    overlong_penalty: float = key(
        "reward that an answer of max_new_tokens loses if overlong_tokens is above 0", 1.0, low=0.0
    )
    on_error: Literal["zero", "drop_sample", "retry"] = key(
        "what happens to an answer whose reward raises an error; retry: the reward is"
        " tried three times, then the answer is dropped as with drop_sample",
        "drop_sample",
    )
    processes: int = key("processes that draw prompts and compute rewards", 2, low=1, high=256)
    timeout_s: float = key("seconds one prompt or reward may take", 10.0, above=0.0, high=3600.0)
    network: bool = key(
        "the task may use the network (false takes effect only if the coordinator runs as root)",
        False,
    )
    memory_bytes_max: int = key(
        "bytes of address space of one task process, mapped files included", 4 << 30, low=256 << 20
    )
    cpu_s_max: int = key("CPU seconds that one prompt or reward may take", 60, low=1, high=3600)
    environment: tuple[str, ...] = key(
        "names of environment variables of the coordinator that the task gets", ()
    )
    read_paths: tuple[Path, ...] = key(
        "files and directories that the task needs, besides Python's and its rows", ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTable(Table):
    """One [[eval]]: held-out questions on which versions are scored."""

    TABLE: ClassVar[str] = "eval"

    task: str = key("name of the task that gives questions and reward; empty: the first task", "")
    name: str = key("name of the evaluation; empty: the task's name with /heldout", "")
    options: dict[str, Any] = key(
        "keyword arguments of the task's class that differ from the task's, such as"
        ' split = "heldout" of rows, gym and sort_digits',
        dict,
    )
    every: int = key("least distance from one scored version to the next, in versions", 5, low=1)
    samples: int = key("answers to each question", 1, low=1, high=256)
    rows: int = key("number of questions; 0: all", 200, low=0, high=65536)
    sampling: dict[str, Any] = key(
        "keys of [sampling] that differ from the task's; temperature 0.0 is greedy", dict
    )
    hold_s: float = key(
        "most seconds for which a worker delays a newer version to finish an answer; all turns of an episode "
        "count together",
        60.0,
        above=0.0,
        high=3600.0,
    )
    solved_at: float = key("least reward with which an answer counts as right, for pass@k", 1.0)
