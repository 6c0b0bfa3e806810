"""Runs the demo: coordinator, workers and learner are real processes on one machine, and train a small model by GRPO.

Nothing is faked: HTTP and WebSocket, peer links, signed roots, safetensors, rewards. The results
come from the coordinator's status, the learner's metrics and the weights themselves.
"""

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from echo2d.client import Coordinator
from echo2d.core.capacity.estimators import quantile
from echo2d.demo.chaos import STEPS_MIN as CHAOS_STEPS_MIN
from echo2d.demo.chaos import Chaos, plan_kills
from echo2d.demo.live_view import LiveView, print_result
from echo2d.demo.processes import Program, Programs, start_worker, wait_for
from echo2d.demo.results import (
    DemoResult,
    Quantiles,
    Trajectories,
    WorkerEnd,
    add_up,
    bubble_ratio,
    read_metrics,
    read_rows,
    staleness_histogram,
    tenth,
    trained_again,
)
from echo2d.demo.tiny_model import TinyRecipe, greedy_accuracy, held_out_prompts, make_tiny_model
from echo2d.demo.two_turns import OPENING, second_turn_accuracy
from echo2d.errors import OperatorFault
from echo2d.runtime.run_dir.tokens import create_token
from echo2d.tasks.sort_digits import EOS

STEPS = 80
# The number of samples that one engine generates at once. Three workers then hold a little more than a batch.
SLOTS = 96
START_S = 60.0  # A program may take this long to start, because it imports torch.
_POLL_S = 0.25
CACHE = Path.home() / ".cache" / "echo2d"

DemoTask = Literal["sort_digits", "two_turn_digits", "agents"]
# The value of task.kind for the names of tasks that are not registered.
DEMO_KINDS = {"two_turn_digits": "echo2d.demo.two_turns:TwoTurnDigits"}
MEASURES: Mapping[DemoTask, Callable[..., float]] = {
    "sort_digits": greedy_accuracy,
    "two_turn_digits": second_turn_accuracy,
    "agents": partial(second_turn_accuracy, opening=(OPENING,)),
}

CONFIG = """\
[run]
base_model = "{model}"

[coordinator]
port = 0

[policy]
staleness_max = {staleness}
publish_every = {kappa}
trajectories_per_step = 256
group_size = 8

[sampling]
max_new_tokens = 12

[task]
kind = "{task}"
options = {{ rng_seed = {seed} }}
processes = 1

[dissemination]
shape = "chain"
delta = {delta}
"""

# With outside agents the config has these options of their task, and this further table.
_AGENTS = f"{{ opening = [{OPENING}], stop_token_ids = [{EOS}] }}"
_GATEWAY = """
[gateway]
enabled = true
"""

DEMO_LEARNER = """
[learner]
steps = {steps}
lr = 2e-4
threads = 1
checkpoint_every = 15
rng_seed = {seed}
"""


@dataclass(frozen=True, slots=True)
class Demo:
    """The options of `echo2d demo`.

    task: sort_digits; two_turn_digits, whose accuracy is that of the second answer; or agents, which is the same game
    of two turns, played by an outside program.
    """

    steps: int = STEPS
    workers: int = 3
    staleness: int = 2  # S
    kappa: int = 1  # train steps per publish
    seed: int = 0  # of all random numbers
    as_json: bool = False
    chaos: bool = False
    delta: bool = True
    run_dir: Path | None = None
    task: DemoTask = "sort_digits"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise OperatorFault(f"--steps: expected at least 1; found {self.steps}")
        if self.chaos and self.steps < CHAOS_STEPS_MIN:
            raise OperatorFault(
                f"--chaos: expected at least {CHAOS_STEPS_MIN} steps; found {self.steps}"
            )
        if self.kappa > self.staleness + 1:
            raise OperatorFault(
                f"--kappa: expected at most staleness + 1 = {self.staleness + 1}; found {self.kappa}"
            )


def run_demo(demo: Demo) -> int:
    """Run, show and judge a demo.

    Returns the exit code: 0 if it kept its promises, 1 if it did not, 130 after Ctrl-C.
    """
    run = (demo.run_dir or _fresh_directory(Path("runs"))).absolute()
    if (run / "coordinator").exists():
        raise OperatorFault(f"{run} holds a run already; choose another --run-dir")
    run.mkdir(parents=True, exist_ok=True)
    view = LiveView(demo.steps)
    view.say(f"run directory {run}")
    # SIGTERM ends the demo like Ctrl-C, so that no program is left running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = _run(demo, run, view)
    except KeyboardInterrupt:
        view.say(f"stopped; logs are in {run / 'logs'}")
        # The exit code after Ctrl-C, as in a shell.
        return 130
    if demo.as_json:
        print(json.dumps(result.as_dict()))
    else:
        print_result(result)
        print(f"trained model: echo2d keep export --run-dir {run / 'coordinator'} --last DIR")
    broken = result.broken_promises(judge_accuracy=demo.steps >= STEPS)
    for promise in broken:
        view.say(f"broken promise: {promise}")
    return 1 if broken else 0


def _fresh_directory(parent: Path) -> Path:
    number = 1
    while (parent / f"demo-{number}").exists():
        number += 1
    return parent / f"demo-{number}"


def _run(demo: Demo, run: Path, view: LiveView) -> DemoResult:
    view.say("making the tiny model (cached after the first time)")
    recipe = TinyRecipe(rng_seed=demo.seed)
    model = make_tiny_model(CACHE, recipe)
    start = time.monotonic()
    with Programs(run / "logs") as programs:
        url = _start_coordinator(demo, run, model, programs)
        with Coordinator(
            url, token_file=run / "coordinator" / "tokens" / "viewer.token"
        ) as coordinator:
            learner = _start_others(demo, run, url, programs)
            planned = plan_kills(demo.steps, demo.workers, demo.seed) if demo.chaos else ()
            chaos = Chaos(planned, programs, _metrics(run), view.say)
            facts = _watch(coordinator, programs, learner, chaos, run, view)
            wall_s = time.monotonic() - start
            facts = _settled(coordinator, programs, chaos, facts, demo)
        view.say("measuring held-out accuracy of version 0 and the last")
        prompts = held_out_prompts(recipe)
        measure = partial(MEASURES[demo.task], prompts=prompts)
        last = measure(next((run / "coordinator" / "versions").glob(f"{demo.steps}-*")))
    accuracy = (measure(model), last)
    result = _result(
        demo,
        add_up([*chaos.lives, facts]),
        read_metrics(_metrics(run)),
        accuracy=accuracy,
        wall_s=wall_s,
    )
    again, changed = trained_again(read_rows(_metrics(run)))
    return replace(result, steps_again=again, batches_changed=changed, kills=chaos.kills())


def _metrics(run: Path) -> Path:
    return run / "learner" / "metrics.jsonl"


def _start_coordinator(demo: Demo, run: Path, model: Path, programs: Programs) -> str:
    """Start the coordinator and return its URL once it listens."""
    (run / "snapshots").mkdir()
    facts = {
        "run": run,
        "model": model,
        "staleness": demo.staleness,
        "kappa": demo.kappa,
        "seed": demo.seed,
        "task": DEMO_KINDS.get(demo.task, demo.task),
    }
    config = run / "run.toml"
    text = CONFIG.format(**facts, delta=json.dumps(demo.delta))
    if demo.task == "agents":
        text = text.replace(f"{{ rng_seed = {demo.seed} }}", _AGENTS) + _GATEWAY
    config.write_text(text)
    programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
    announced = json.loads(wait_for(run / "coordinator" / "coordinator.json", programs, START_S))
    url = str(announced["url"])
    learner = DEMO_LEARNER.format(**facts, steps=demo.steps)
    # The ports are written into the config, so that a coordinator that restarts listens at the same address.
    ports = f"port = {announced['port']}\n\n[link]\nport = 0"
    config.write_text(config.read_text().replace("port = 0", ports) + learner)
    return url


def _start_others(demo: Demo, run: Path, url: str, programs: Programs) -> Program:
    """Start the workers, each with its own credential, and the learner. Returns the learner."""
    for number in range(1, demo.workers + 1):
        limits = (f"--slots={SLOTS}", "--threads=1")
        start_worker(programs, f"worker-{number}", run, url, *limits)
    if demo.task == "agents":
        token = run / "agent.token"
        create_token(
            run / "coordinator",
            "agent",
            role="agent",
            url=url,
            out=token,
            max_workers=1,
            expires="7d",
        )
        programs.start("agent", "-m", "echo2d.demo.agent", str(token))
    return programs.start("learner", "-m", "echo2d", "learn", "--config", str(run / "run.toml"))


def _watch(
    coordinator: Coordinator,
    programs: Programs,
    learner: Program,
    chaos: Chaos,
    run: Path,
    view: LiveView,
) -> dict[str, Any]:
    """Show the run until the learner is done, and return the last status."""
    with view:
        while True:
            done = learner.returncode is not None
            facts = coordinator.status()
            view.show(facts, read_metrics(_metrics(run)), now=time.monotonic())
            programs.check()
            if done:
                return facts
            chaos.look(facts)
            time.sleep(_POLL_S)


def _settled(
    coordinator: Coordinator, programs: Programs, chaos: Chaos, facts: dict[str, Any], demo: Demo
) -> dict[str, Any]:
    """Wait until every worker serves the last version and all killed processes have recovered, but at most a minute.
    Returns the last status.
    """
    deadline = time.monotonic() + 60.0
    while not (_all_serve(facts, demo) and chaos.quiet) and time.monotonic() < deadline:
        programs.check()
        chaos.look(facts)
        time.sleep(_POLL_S)
        facts = coordinator.status()
    return facts


def _all_serve(facts: Mapping[str, Any], demo: Demo) -> bool:
    ends = _worker_ends(facts)
    return len(ends) == demo.workers and all(
        end.version == demo.steps and end.digest_ok for end in ends
    )


def _worker_ends(facts: Mapping[str, Any]) -> tuple[WorkerEnd, ...]:
    return tuple(
        WorkerEnd(
            id=worker["id"],
            version=None if worker["serving"] is None else worker["serving"]["version"],
            digest_ok=worker["memory_ok"] is True,
        )
        for worker in facts["workers"]
    )


def _result(
    demo: Demo,
    facts: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    accuracy: tuple[float, float],
    wall_s: float,
) -> DemoResult:
    histogram = staleness_histogram(rows)
    copies = list(facts["seed_copies"].values())
    trained_s = sum(float(row["t_train_s"]) + float(row["wait_s"]) for row in rows[1:])
    return DemoResult(
        steps=len(rows),
        accuracy_first=accuracy[0],
        accuracy_last=accuracy[1],
        reward_first=tenth(rows, last=False),
        reward_last=tenth(rows, last=True),
        max_staleness=max(histogram),
        staleness_bound=demo.staleness,
        staleness_histogram=histogram,
        bubble_ratio=bubble_ratio(rows),
        t_train_s=quantile([float(row["t_train_s"]) for row in rows], 0.5) or 0.0,
        t_bcast_s=Quantiles.of(facts["t_bcast_s"]),
        refit_pause_s=Quantiles.of(facts["refit_pause_s"]),
        tokens_per_s=sum(int(row["tokens"]) for row in rows[1:]) / trained_s if trained_s else 0.0,
        seed_copies=sum(copies) / len(copies) if copies else 0.0,
        wire_bytes=facts["wire_bytes"],
        full_bytes=facts["full_bytes"],
        trajectories=Trajectories(**facts["trajectories"]),
        versions_published=facts["versions_published"],
        wall_s=wall_s,
        workers=_worker_ends(facts),
    )
