"""Draws the status of a run for a terminal: training, workers, the version that is being sent, alerts.

The module draws a `Status` (`core/status/schema.py`) and makes no request. Names and texts that come from other
machines are shown as text, never as markup.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo2d.core.capacity.estimators import quantile
from echo2d.core.status.json_form import read_own_status, read_status
from echo2d.core.status.schema import (
    BroadcastStatus,
    ClientModelStatus,
    EpisodesStatus,
    FaultStatus,
    OwnPeerStatus,
    ProgressStatus,
    RentingStatus,
    SessionStatus,
    Status,
    TinkerStatus,
    WorkerStatus,
)
from echo2d.errors import OperatorFault

SPARK = "▁▂▃▄▅▆▇█"
SPARK_CELLS = 50
# The width of the output if it goes to no terminal and COLUMNS is not set.
PLAIN_COLUMNS = 140
COLOURS = {"joined": "green", "suspected": "yellow", "gone": "red"}


def print_status(facts: Mapping[str, Any], *, only: str = "") -> None:
    """Print the answer of `GET /v1/status` in a few lines. only: as in `status_picture`.

    PeerFault: facts is not an answer of that endpoint.
    """
    console = plain_console()
    lines = console.height if console.is_terminal else None
    console.print(status_picture(read_status(facts), lines=lines, width=console.width, only=only))


def narrowed(facts: Mapping[str, Any], only: str, *, must: bool = False) -> Mapping[str, Any]:
    """The answer with only those workers or boxes that match `only`, as in `status_picture`.

    OperatorFault: `must` is set and none matches.
    """
    if not only:
        return facts
    known: list[WorkerStatus | OwnPeerStatus] = []
    if (key := "workers") in facts:
        known += read_status(facts).workers
    else:
        key = "peers"
        known += read_own_status(facts).peers
    kept = [row for row, each in zip(facts[key], known, strict=True) if _is_meant(only, each)]
    if must and not kept:
        names = ", ".join(each.name for each in known) or "no worker"
        raise OperatorFault(
            f"--worker: {only!r} is in the name, the id or the state of no worker; there is {names}"
        )
    return {**facts, key: kept}


def plain_console() -> Console:
    """The terminal; for a file or pipe a console with the width of COLUMNS, or PLAIN_COLUMNS."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    width = get_terminal_size((PLAIN_COLUMNS, 0)).columns
    return Console(highlight=False, width=width)


def status_picture(
    status: Status,
    *,
    tokens_per_s: float | None = None,
    lines: int | None = None,
    width: int = PLAIN_COLUMNS,
    only: str = "",
) -> RenderableType:
    """The whole picture. lines: height of the terminal; workers that do not fit are only counted.

    width: width of the terminal; columns that do not fit are left out. only: part of the name, the id or the state of
    the workers to show.
    """
    sentences, faults = status.attention, status.faults[-5:]
    egress, room, most = [*_costs(status), *_egress(status)], None, None
    if lines is not None:
        # A terminal shows up to 8 alerts; other output shows all of them.
        sentences = sentences[:8]
        # Besides workers, alerts and faults a picture has 22 lines. Four of them are room for a long bottleneck.
        others = 22 + len(egress) + len(sentences) + len(faults)
        if status.tinker is not None:
            most = max(4, (lines - others) // 2)
            others += min(most, sum(1 for _ in _rows_of(status.tinker))) + 4
        # At least 4 workers are shown, however small the terminal is.
        room = max(4, lines - others)
    parts: list[RenderableType] = [
        _main_numbers(status, tokens_per_s, width),
        *_provision(status),
        *_held(status),
        *_rented(status),
        *egress,
        *_reward_and_staleness(status),
        *_spreading(status),
        *_auditing(status),
        *_evaluating(status),
        *_playing(status),
        *_clients(status, most, width),
        Text(),
        workers_table(status, rows=room, width=width, only=only),
    ]
    if sentences or faults:
        parts.append(Text())
    return Group(*parts, *map(_alert_line, sentences), *map(_fault, faults))


def _main_numbers(status: Status, tokens_per_s: float | None, width: int) -> Panel:
    """The frame at the top: the run's name, and its main numbers."""
    return Panel(
        _tiles(status, tokens_per_s, width),
        title=_title(status),
        title_align="left",
        border_style="cyan",
    )


def _alert_line(sentence: str) -> Text:
    return Text.assemble(("  ! ", "bold yellow"), sentence)


def _title(status: Status) -> Text:
    process = status.process
    run = "-" if process is None else f"{process.run.name} {process.run_id}".strip()
    seed = ("●", "green") if status.seed_alive else ("○", "red")
    return Text.assemble(("echo2d ", "bold"), f"run {run}  epoch {status.epoch}  seed ", seed)


def _tiles(status: Status, tokens_per_s: float | None, width: int) -> Table:
    """The main numbers of a run, as rows of label and value."""
    grid = Table.grid(expand=True, padding=(0, 1))
    tiles = (
        _training_tiles(status, tokens_per_s)
        if status.tinker is None
        else _client_tiles(status, status.tinker)
    )
    cells = [cell for tile in tiles.items() for cell in tile]
    for count in range(4, 0, -1):
        rows = [cells[at : at + 2 * count] for at in range(0, len(cells), 2 * count)]
        # Each cell has a space on both sides, and the frame takes four.
        widest = [max(map(cell_len, column)) + 2 for column in zip_longest(*rows, fillvalue="")]
        if sum(widest) + 4 <= width:
            break
    for place in range(2 * count):
        grid.add_column(justify="left" if place % 2 else "right", style="" if place % 2 else "dim")
    for row in rows:
        grid.add_row(*row)
    return grid


def _training_tiles(status: Status, tokens_per_s: float | None) -> dict[str, str]:
    newest, groups, totals = status.newest_version, status.groups, status.totals
    bubble, t_bcast_s = status.bubble_ratio, status.t_bcast_s
    return {
        "step": _step(status),
        "version": "-" if newest is None else str(newest.version),
        "S, kappa": f"{status.staleness_max}, {status.publish_every}",
        "bubble": "-" if bubble is None else f"{bubble:.1%}",
        "train step": seconds(quantile(status.t_train_s, 0.5)),
        "T_bcast": seconds(quantile(t_bcast_s, 0.5)),
        "its p95": seconds(quantile(t_bcast_s, 0.95)),
        "refit": _refit(quantile(status.refit_pause_s, 0.5), quantile(status.recompute_s, 0.5)),
        "leases": str(groups.leases),
        "groups in flight": str(groups.in_flight),
        "buffered": str(groups.buffered),
        "tokens/s": "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}",
        "trained": f"{totals.trained:,}",
        "dropped": f"{totals.dropped:,}",
        "refused": f"{sum(status.results_refused.values()):,}",
        "published": f"{totals.published:,}",
    }


def _client_tiles(status: Status, tinker: TinkerStatus) -> dict[str, str]:
    """The numbers of all clients of the Tinker API together, since the coordinator started."""
    newest, callers, t_bcast_s = status.newest_version, tinker.callers, status.t_bcast_s
    return {
        "sessions": str(len(tinker.sessions)),
        "models": str(sum(each.models for each in callers)),
        "steps": f"{sum(each.steps for each in callers):,}",
        "tokens trained": f"{sum(each.trained_tokens for each in callers):,}",
        "version": "-" if newest is None else str(newest.version),
        "T_bcast": seconds(quantile(t_bcast_s, 0.5)),
        "refit": _refit(quantile(status.refit_pause_s, 0.5), quantile(status.recompute_s, 0.5)),
        "tokens sampled": f"{sum(each.sampled_tokens for each in callers):,}",
    }


def _step(status: Status) -> str:
    """The committed step, the number of steps of the run, and the time that the remaining steps will take."""
    steps, eta_s = status.learner.steps, status.learner.eta_s
    if steps is None:
        return f"{status.committed_step} committed"
    left = f", {age(eta_s)} left" if eta_s else ""
    return f"{status.committed_step} of {steps}{left}"


def _provision(status: Status) -> Iterable[RenderableType]:
    """The bottleneck, and which workers are active."""
    provision = status.provision
    label = "bottleneck" if status.tinker is None else "queue"
    yield _labelled(label, provision.bottleneck.text)
    if provision.activation == "auto":
        here = [worker for worker in status.workers if worker.state == "joined"]
        working = sum(worker.active for worker in here)
        aim = provision.mu_target
        aimed = "" if aim is None else f"; the target is {per_h(aim)}"
        words = (
            f"{working} of {len(here)} workers work, "
            f"{per_h(provision.mu_pool)} trajectories/h{aimed}"
        )
        yield _labelled("activation", f"{words}; {provision.why}" if provision.why else words)


def _costs(status: Status) -> Iterable[Text]:
    """What the workers cost; nothing if no worker has a price."""
    costs = status.costs
    if not costs.workers_usd:
        return
    step = "" if costs.usd_per_step is None else f", {costs.usd_per_step:.2g} a step"
    steps = f" for {costs.steps} steps" if status.tinker is None else ""
    yield Text.assemble(
        _label("workers"),
        f"{costs.workers_usd_per_h:.2f} usd/h; {costs.workers_usd:.2f} usd{steps} "
        f"since the coordinator started{step}",
    )


def _egress(status: Status) -> Iterable[Text]:
    """What the seed has sent, and its cost; nothing if the seed's traffic is free."""
    if not status.seed_usd_per_gb_up:
        return
    words = f"{size(status.seed_sent_bytes)} for {status.seed_usd_total:.2f} usd"
    if status.seed_usd:
        version, usd = max(status.seed_usd.items())
        words += f"; version {version} {status.seed_copies[version]:.1f} times, {usd:.3f} usd"
    yield Text.assemble(_label("seed sent"), words)


def _held(status: Status) -> Iterable[RenderableType]:
    """Whose weights workers hold for clients of the Tinker API."""
    tinker = status.tinker
    if tinker is None or not tinker.held:
        return
    words = ", ".join(f"{each.weights} as version {each.version}" for each in tinker.held)
    for session in tinker.sessions:
        words = words.replace(session.session, _short(session.session))
    yield _labelled("held", words)


def _clients(status: Status, rows: int | None, width: int) -> Iterable[RenderableType]:
    """The sessions of the Tinker API."""
    if status.tinker is not None and status.tinker.sessions:
        yield Text()
        yield sessions_table(status.tinker, rows=rows, width=width)


def sessions_table(
    tinker: TinkerStatus, *, rows: int | None = None, width: int = PLAIN_COLUMNS
) -> Table:
    """The open sessions; one with several models also has a row for each of them. Columns that do not fit are left out.

    rows: show at most this many, those that were heard last.
    """
    every = list(_rows_of(tinker))
    priced = any(each.cost_usd is not None for each in tinker.sessions)
    columns = [name for name in every[0] if priced or name != "usd"]
    spared = (
        "age", "saved", "to score", "train time", "drawing", "session", "heard", "wait", "queued", "trained", "sampled",
        "steps",
    )  # fmt: skip
    more = Text("" if rows is None else f"  and {len(every)} more", style="dim")
    table = _table(
        _fitting(columns, every, [more], width, spared),
        every[:rows],
        {"client", "session", "model"},
    )
    if rows is not None and len(every) > rows:
        table.add_row(Text(f"  and {len(every) - rows} more", style="dim"))
    return table


def _rows_of(tinker: TinkerStatus) -> Iterable[dict[str, Text]]:
    for session in sorted(tinker.sessions, key=lambda each: each.silent_s):
        yield from _session_rows(session)


def _session_rows(session: SessionStatus) -> Iterable[dict[str, Text]]:
    models, usd = session.models, session.cost_usd
    other = f" ({session.other_weights} other)" if session.other_weights else ""
    row = {
        "client": session.caller,
        "session": _short(session.session),
        "age": age(session.age_s),
        "heard": age(session.silent_s),
        "model": _models_words(models),
        **_trained_cells(session),
        "sampled": f"{session.sampled_tokens:,}",
        "drawing": f"{session.drawn:,}",
        "wait": f"{session.samples_waiting:,}{other}",
        "to score": f"{session.unscored:,}",
        "saved": f"{session.checkpoints:,}",
        "usd": "-" if usd is None else f"{usd:.2f}",
    }
    yield {name: Text(words) for name, words in row.items()}
    for model in models if len(models) > 1 else ():
        cells = {"model": _model_words(model), **_trained_cells(model)}
        yield {name: Text(cells.get(name, ""), style="dim") for name in row}


def _trained_cells(of: SessionStatus | ClientModelStatus) -> dict[str, str]:
    waits = f"{of.operations_waiting:,}"
    if of.bytes_waiting:
        waits += f", {size(of.bytes_waiting)}"
    return {
        "steps": f"{of.steps:,}",
        "trained": f"{of.trained_tokens:,}",
        "train time": seconds(of.train_s),
        "queued": waits,
    }


def _short(session: str) -> str:
    return session[:8]


def _models_words(models: Sequence[ClientModelStatus]) -> str:
    if len(models) == 1:
        return _model_words(models[0])
    return f"{len(models)} models" if models else "-"


def _model_words(model: ClientModelStatus) -> str:
    rank = "not made yet" if model.rank is None else f"rank {model.rank}"
    return f"{model.model.partition(':')[2]}, {rank if model.rank != 0 else 'full weights'}"


def _labelled(label: str, words: str) -> Table:
    """A label with words that may wrap; wrapped lines start in the column of the words."""
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row(Text(*_label(label)), Text(words))
    return grid


def _rented(status: Status) -> Iterable[Text]:
    if status.process is not None and status.process.renting is not None:
        yield Text.assemble(_label("rented"), rented_words(status.process.renting))


def rented_words(renting: RentingStatus) -> str:
    """The rented boxes, their cost, and what is left of the budget."""
    states = ", ".join(f"{count} {state}" for state, count in renting.states.items() if count)
    return (
        f"{len(renting.boxes)} boxes{f' ({states})' if states else ''}, "
        f"{renting.usd_per_h:.2f} of {renting.usd_per_h_max:g} usd/h; "
        f"spent {renting.spent_usd:.2f} of {renting.usd_total_max:g} usd, "
        f"{renting.set_aside_usd:.2f} set aside, {renting.left_usd:.2f} left"
    )


def _reward_and_staleness(status: Status) -> Iterable[Text]:
    rewards = [reward for _, reward in status.rewards]
    if rewards:
        yield Text.assemble(
            _label("reward"), (spark(rewards[-SPARK_CELLS:]), "green"), f"  {rewards[-1]:.3f}"
        )
    if status.staleness:
        yield Text.assemble(_label("staleness"), staleness_bars(status.staleness))


def staleness_bars(histogram: Mapping[Any, int]) -> str:
    """The share of trained trajectories of each staleness."""
    total = sum(histogram.values()) or 1
    return "   ".join(
        f"{staleness}: {bar(n, total, 8)} {n / total:4.0%}" for staleness, n in histogram.items()
    )


def _evaluating(status: Status) -> Iterable[Text]:
    for each in status.evaluations:
        words = "no version is scored yet"
        if each.version is not None:
            words = f"version {each.version}: {scored_words(each.mean, each.se)}"
            words += f", {each.rows} of {each.of} questions" if each.rows < each.of else ""
        if each.open_version is not None:
            words += f"; version {each.open_version}: {each.open_answers} of {each.open_of} answers"
        yield Text.assemble(_label(each.name), words)


def _playing(status: Status) -> Iterable[Text]:
    """The episodes that wait for their environment or for a slot, so that no worker writes them at present."""
    for task in status.tasks:
        if task.episodes is not None:
            yield Text.assemble(_label(task.name or "environment"), episodes_words(task.episodes))


def episodes_words(episodes: EpisodesStatus) -> str:
    offered = f", {episodes.offered:,} offered to agents" if episodes.offered else ""
    took = ""
    if episodes.tool_s_median is not None:
        took = (
            f"; a step takes it {seconds(episodes.tool_s_median)}, "
            f"p90 {seconds(episodes.tool_s_p90)}"
        )
    return (
        f"{episodes.parked:,} samples wait for the environment, "
        f"{episodes.waiting:,} for a slot{offered}{took}"
    )


def scored_words(mean: float | None, se: float | None) -> str:
    """A mean with its standard error."""
    if mean is None:
        return "-"
    return f"{mean:.3f}" + ("" if se is None else f" +- {se:.3f}")


def _auditing(status: Status) -> Iterable[Text]:
    audit = status.audit
    if audit is None:
        return
    learns = f", {audit.learnt:.0%} of the limits learnt" if audit.learnt < 1 else ""
    if audit.learnt_mixed is not None and audit.learnt_mixed < 1:
        learns += f", {audit.learnt_mixed:.0%} of those for mixed KV"
    delay = "" if audit.delay_s is None else f", a verdict takes {seconds(audit.delay_s)}"
    yield Text.assemble(
        _label("audit"),
        f"{audit.scored:,} scored, {audit.pending} waiting{learns}{delay}",
        ("" if audit.auditors else ", no auditor is here", "bold red"),
    )


def _spreading(status: Status) -> Iterable[Text]:
    broadcast = status.broadcast
    if not broadcast or not broadcast.peers:
        return
    verified = sum(peer.verified for peer in broadcast.peers)
    count, predicted_s, waiting = (
        len(broadcast.peers),
        broadcast.predicted_s,
        broadcast.waiting_version,
    )
    bytes_sent = size(broadcast.wire_bytes or broadcast.full_bytes)
    words: list[str | tuple[str, str]] = [
        _label(f"version {broadcast.version}"),
        (bar(verified, count), "green" if verified == count else "cyan"),
        f"  verified by {verified} of {count}",
        f", {bytes_sent} in a {broadcast.shape or 'plan that is not made yet'}",
        "" if predicted_s is None else f", predicted {seconds(predicted_s)}",
        "" if waiting is None else f"; version {waiting} waits",
    ]
    yield Text.assemble(*words)


def _label(text: str) -> tuple[str, str]:
    return f"  {text:<14}", "dim"


def _is_meant(only: str, worker: WorkerStatus | OwnPeerStatus) -> bool:
    return any(only in text for text in (worker.name, worker.id, state_word(worker)))


def workers_table(
    status: Status, *, rows: int | None = None, width: int = PLAIN_COLUMNS, only: str = ""
) -> Table:
    """The workers, and how much each has of the version that is being sent.

    If not all workers fit, those in trouble come first. If not all columns fit, the less important ones are left out.
    No word and no number is cut. width, only: as in `status_picture`.
    """
    wanted = [worker for worker in status.workers if _is_meant(only, worker)]
    # Workers that have been gone for 600 s are only counted: spot boxes come and go all day.
    workers = [worker for worker in wanted if worker.state != "gone" or worker.silent_s < 600.0]
    if rows is not None:
        workers.sort(key=trouble)
    broadcast = status.broadcast
    progress = {peer.id: peer for peer in broadcast.peers} if broadcast else {}
    arrival = f"gets v{broadcast.version}" if broadcast else "broadcast"
    shown = [
        {**worker_cells(each), arrival: _arrival(progress.get(each.id), broadcast)}
        for each in workers[:rows]
    ]
    more = [Text(f"  and {len(each)} more") for each in (workers, wanted)]
    columns = _fitting([*columns_of(status), arrival], shown, more, width, (*_SPARED, arrival))
    table = _table(columns, shown, {*_WORDS, arrival})
    if rows is not None and len(workers) > rows:
        rest = workers[rows:]
        joined = sum(worker.state == "joined" for worker in rest)
        table.add_row(
            Text(f"  and {len(rest)} more", style="dim"), Text(f"{joined} joined", style="dim")
        )
    if gone := len(wanted) - len(workers):
        table.add_row(Text(f"  and {gone} gone", style="dim"))
    return table


_COLUMNS = (
    "worker",
    "state",
    "build",
    "serves",
    "lag",
    "running",
    "leases",
    "accepted",
    "per h",
    "used",
    "reward",
    "tokens",
    "audit",
    "usd/h",
    "usd",
    "refit",
    "heard",
)
_WORDS = {"worker", "state", "build", "audit"}
# The order in which columns are left out if not all fit.
_SPARED = (
    "tokens", "used", "reward", "usd", "usd/h", "refit", "audit", "per h", "heard", "accepted", "running",
    "leases", "lag", "serves",
)  # fmt: skip


def _table(
    columns: Sequence[str], rows: Iterable[Mapping[str, Text]], left: Container[str]
) -> Table:
    """left: the columns of words; those of numbers are aligned right."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*(cells[name] for name in columns))
    return table


def _fitting(
    columns: list[str],
    rows: Sequence[Mapping[str, Text]],
    more: Iterable[Text],
    width: int,
    spared: Sequence[str],
) -> list[str]:
    """As many of these columns as fit, each as wide as its widest cell plus two spaces.

    more: further cells of the first column, below the rows. spared: the order in which columns are left out.
    """
    widths = {
        name: 2 + max([cell_len(name), *(row[name].cell_len for row in rows)]) for name in columns
    }
    widths[columns[0]] = max(widths[columns[0]], *(2 + each.cell_len for each in more))
    for name in spared:
        if sum(widths.values()) <= width:
            break
        widths.pop(name, None)
    return list(widths)


def columns_of(status: Status) -> list[str]:
    """The columns to show: prices only if a worker has one, builds only if they differ."""
    priced = any(worker.usd_per_h for worker in status.workers)
    hidden = set[str]() if priced else {"usd/h", "usd"}
    hidden |= {"audit"} if status.audit is None else set()
    if status.tinker is not None:
        # There are no groups, so there are no rewards and no trajectories.
        hidden |= {"accepted", "per h", "used", "reward", "tokens"}
    builds = {worker.build for worker in status.workers if worker.state != "gone"}
    builds |= set() if status.process is None else {status.process.build}
    hidden |= {"build"} if len(builds) == 1 else set()
    return [name for name in _COLUMNS if name not in hidden]


def trouble(worker: WorkerStatus) -> tuple[bool, bool, int, str]:
    """A sort key: silent workers come first, then the others by lag; workers that are gone come last."""
    lag = worker.lag
    # A worker that serves no version has no lag, and ranks as if it lagged most.
    return (worker.state == "gone", worker.alive, -(1 << 30 if lag is None else lag), worker.name)


def running_word(worker: WorkerStatus) -> str:
    """The running samples and the usable slots; if the worker offers more slots than are usable, also that number."""
    offered = f" of {worker.slots}" if worker.usable < worker.slots else ""
    return f"{worker.running}/{worker.usable}{offered}"


def worker_cells(worker: WorkerStatus) -> dict[str, Text]:
    serving, lag, state = worker.serving, worker.lag, worker.state
    dialled = ", not dialable" if worker.reachable is False else ""
    colour = COLOURS[state] if worker.alive or state == "gone" else COLOURS["suspected"]
    return {
        "worker": Text.assemble(("● ", colour), worker.name),
        "state": Text(state_word(worker) + dialled, style=colour),
        "build": Text(worker.build),
        "serves": Text("-" if serving is None else f"v{serving.version}"),
        "lag": Text("-" if lag is None else str(lag)),
        "running": Text(running_word(worker)),
        "leases": Text(str(worker.leases)),
        "accepted": Text(f"{worker.accepted:,}"),
        "per h": _makes(worker),
        "used": Text(f"{worker.used:.0%}"),
        "reward": _reward(worker),
        "tokens": Text("-" if worker.answer_tokens is None else f"{worker.answer_tokens:.0f}"),
        "audit": _audit(worker),
        "usd/h": Text(f"{worker.usd_per_h:.2f}"),
        "usd": Text(f"{worker.cost_usd:.2f}"),
        "refit": Text(_refit(worker.refit_pause_s, worker.recompute_s)),
        "heard": Text(age(worker.silent_s), style="dim"),
    }


def _refit(pause_s: float | None, recompute_s: float | None) -> str:
    """The pause of a refit, and the time in which KV caches were computed again, if there was any."""
    return f"{seconds(pause_s)} + {seconds(recompute_s)}" if recompute_s else seconds(pause_s)


def _makes(worker: WorkerStatus) -> Text:
    """Trajectories/h; a ~ marks a rate that is expected, not measured."""
    mu = worker.mu
    if mu is None or worker.state == "gone":
        return Text("-")
    return Text(per_h(mu)) if worker.mu_sd is not None else Text(f"~{per_h(mu)}", style="dim")


def _reward(worker: WorkerStatus) -> Text:
    """The worker's mean reward, and by how much it exceeds that of other workers on the same prompts."""
    if worker.reward is None:
        return Text("-")
    above = "" if worker.reward_above is None else f" {worker.reward_above:+.2f}"
    return Text.assemble(f"{worker.reward:.2f}", (above, "dim"))


def _audit(worker: WorkerStatus) -> Text:
    """The worker's standing in the audit, and how many of its audited answers are flagged."""
    style = {"convicted": "bold red", "flagged": "yellow", "suspected": "red"}
    words = (worker.standing or "-", style.get(worker.standing, ""))
    return Text.assemble(words, (f" {worker.flagged}/{worker.audited}", "dim"))


def state_word(worker: WorkerStatus | OwnPeerStatus) -> str:
    """The word for a worker's state; "away": it has joined, but its link is down."""
    if worker.state != "joined" or not worker.alive:
        return "away" if worker.state == "joined" else str(worker.state)
    if worker.draining or worker.cordoned:
        return "draining" if worker.draining else "cordoned"
    return "leaving" if worker.leaving else "joined" if worker.active else "standby"


def _arrival(peer: ProgressStatus | None, broadcast: BroadcastStatus | None) -> Text:
    if peer is None or broadcast is None:
        return Text()
    total = broadcast.wire_bytes or broadcast.full_bytes
    share = 1.0 if peer.verified else min(1.0, peer.payload_bytes / total)
    colour = "green" if peer.verified else "red" if peer.failed else "cyan"
    return Text.assemble((bar(share, 1.0, 10), colour), f" {share:4.0%}")


def _fault(fault: FaultStatus) -> Text:
    times = f"  x {fault.times}" if fault.times > 1 else ""
    ago = (f"{age(fault.age_s):>10} ago  ", "dim")
    return Text.assemble(ago, (f"{fault.kind:<8}", "red"), f"{fault.text}{times}")


def bar(part: float, whole: float, cells: int = 24) -> str:
    """A progress bar; it is empty if the whole is 0."""
    filled = round(cells * min(1.0, part / whole)) if whole else 0
    return "█" * filled + "░" * (cells - filled)


def spark(values: Sequence[float]) -> str:
    """Each value as one of eight heights, 0 to the largest."""
    top = max(values, default=0.0) or 1.0
    return "".join(
        SPARK[max(0, min(len(SPARK) - 1, int(value / top * len(SPARK))))] for value in values
    )


def seconds(value: float | None) -> str:
    """A measured duration as text."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def per_h(mu: float) -> str:
    """Trajectories/s as trajectories/h."""
    return f"{3600.0 * mu:,.0f}"


def age(value: float) -> str:
    """A time span in whole units, for example how long ago something happened."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{max(0.0, value):.0f} s"


def size(value: float) -> str:
    """Bytes in decimal units."""
    for unit, length in (("GB", 1e9), ("MB", 1e6)):
        if value >= length:
            return f"{value / length:.1f} {unit}"
    return f"{value / 1e3:.0f} kB"


class TokenRate:
    """Tokens per second over the last few updates, smoothed."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._rate = 0.0

    def update(self, tokens: int, now: float) -> float:
        # If there are fewer tokens than before, the coordinator has restarted its count, and the interval is skipped.
        if self._last is not None and now > self._last[1] and tokens >= self._last[0]:
            measured = (tokens - self._last[0]) / (now - self._last[1])
            self._rate += 0.2 * (measured - self._rate)
        self._last = (tokens, now)
        return self._rate
