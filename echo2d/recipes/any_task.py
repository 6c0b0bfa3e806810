"""The recipe for any task: the built-in one, a Python class, an environment, or agents outside.

    the task's class --its processes--> its name and first prompt --> the config, the run, the tokens

The task is started and asked as a coordinator does it, so what a run would stumble over is said here.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import RunId
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.demo.two_turns import OPENING
from echo2d.errors import OperatorFault
from echo2d.recipes.learner_table import check_learner_table
from echo2d.recipes.recipe_file import changed, filled, parsed
from echo2d.recipes.run_folder import (
    RUN_DIR,
    SNAPSHOTS,
    Boxes,
    WrittenRun,
    issue_agent_token,
    issue_tokens,
    require_new,
    url_of,
    write_folder,
)
from echo2d.runtime.coordinator.data_plane import open_tasks
from echo2d.runtime.coordinator.main import make_rules
from echo2d.tasks.agents import Agents
from echo2d.tasks.episodes import Episodes
from echo2d.tasks.process import TaskFailed
from echo2d.tasks.sort_digits import EOS, SortDigits

AnyTask = Literal["tiny", "class", "environment", "agents"]

_CACHE = Path.home() / ".cache" / "echo2d"
TINY_MODEL = "model"  # its copy in the folder
# In 80 steps most answers become right.
_TINY = ("sampling.max_new_tokens=12", "learner.steps=80", "learner.lr=2e-4", "learner.threads=1")


@dataclass(frozen=True, slots=True)
class TaskJob:
    """What the operator decides. kind: of `task` "class" and "environment": as task.kind.

    base_model: None: the tiny model, which is made here. settings: "table.key=value".
    """

    task: AnyTask
    folder: Path
    host: str
    kind: str = ""
    base_model: Path | None = None
    port: int = 7700
    max_new_tokens: int = 1024
    boxes: Boxes = field(default_factory=Boxes)
    settings: Sequence[str] = ()


def write_task_run(job: TaskJob) -> WrittenRun:
    """Check the job, write its folder, and return what to type next with.

    OperatorFault: something is missing or wrong. Nothing is written then.
    """
    require_new(job.folder)
    model = _tiny_model() if job.base_model is None else job.base_model
    if not (model / "config.json").is_file():
        raise OperatorFault(
            f"--base-model: {model} has no config.json; expected the directory of a model as Hugging "
            "Face publishes it"
        )
    config, _, _ = _config(job, model.absolute())
    name = asyncio.run(_try(config))
    copies = {} if job.base_model is not None else {TINY_MODEL: model}
    copied = (job.folder / TINY_MODEL).absolute() if copies else model.absolute()
    config, text, url = _config(job, copied)
    path = write_folder(job.folder, text, copies=copies)
    boxes = issue_tokens(job.folder, url, job.boxes)
    agents = issue_agent_token(job.folder, url) if job.task == "agents" else None
    return WrittenRun(path, url, name, boxes, agents)


def _tiny_model() -> Path:
    try:
        return make_tiny_model(_CACHE)
    except ImportError as error:
        raise OperatorFault(
            f"the tiny model is made with torch and transformers, and there is no {error.name}: "
            "install them here, or give --base-model DIR"
        ) from error


def _config(job: TaskJob, model: Path) -> tuple[CoordinatorConfig, str, str]:
    """The config, checked as coordinator and learner check it, its text, and the coordinator's URL."""
    text = changed(filled("any_task", _values(job, model)), [*_presets(job), *job.settings])
    config = CoordinatorConfig.read(parsed(text))
    url = url_of(config.coordinator.host, config.coordinator.port)
    text = changed(text, [f"learner.url={url}"])
    check_learner_table(parsed(text))
    return config, text, url


def _presets(job: TaskJob) -> list[str]:
    tiny = list(_TINY) if job.base_model is None else []
    if job.task != "agents":
        return tiny
    # The tiny model has no chat template, of which the first token would begin each call.
    begin = f"task.options={{ opening = [{OPENING}], stop_token_ids = [{EOS}] }}"
    return [*tiny, *([begin] if tiny else []), "gateway.enabled=true"]


def _values(job: TaskJob, model: Path) -> dict[str, Any]:
    folder = job.folder.absolute()
    return {
        "name": folder.name,
        "run_dir": str(folder / RUN_DIR),
        "snapshot_root": str(folder / SNAPSHOTS),
        "base_model": str(model),
        "host": job.host,
        "port": job.port,
        "max_new_tokens": job.max_new_tokens,
        "kind": {"tiny": SortDigits.name, "agents": Agents.name}.get(job.task, job.kind),
        "url": "",
        "token_file": str(folder / RUN_DIR / "tokens" / "learner.token"),
        "out_dir": str(folder / "learner"),
        "steps": 500,
        "lr": 1e-6,
    }


async def _try(config: CoordinatorConfig) -> str:
    """Start the task as a coordinator does, and draw its first prompt; returns the task's name.

    OperatorFault: the run would fail.
    """
    async with AsyncExitStack() as stack:
        (task,) = await open_tasks(stack, config)
        await asyncio.to_thread(make_rules, config, RunId(""), [task])
        pool = task.pool
        first = await (Episodes(pool).reset(0, 0, 0) if pool.about.environment else pool.prompt(0))
        if isinstance(first, TaskFailed):
            raise OperatorFault(f"task {task.name}: its first prompt: {first.reason}")
        return task.name
