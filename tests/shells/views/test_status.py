"""The status that a person sees: all of it fits, texts of other machines stay text, problems are named."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import echo2d
from echo2d.cli import main
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.status.json_form import read_status, status_json
from echo2d.errors import OperatorFault
from echo2d.views import watch
from echo2d.views.status import (
    PLAIN_COLUMNS,
    TokenRate,
    age,
    narrowed,
    plain_console,
    print_status,
    seconds,
    size,
    status_picture,
)
from echo2d.views.watch import Screen
from echo2d_lab.research.status_picture import svg
from tests.support.coordinator_world import World, train
from tests.support.status import pinned_keys
from tests.support.tinker_clients import serving


def seen(facts: dict[str, Any], *, width: int = 110, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(status_picture(read_status(facts), width=width, **options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def facts_of(world: World) -> dict[str, Any]:
    """What `GET /v1/status` answers."""
    return status_json(world.state.status(now=world.now))


def trained() -> World:
    world = World()
    world.connect("seed", kind="seed")
    for name in ("a", "b[/x]"):
        world.connect(name)
    train(world, 3)
    world.drain()
    for name in ("a", "b[/x]"):
        world.refit(world.peers[name])
    world.ask_batch(4)
    world.drain()
    world.state._statistics.fault("refit", "b[/x], version 2: out of memory")
    world.now += 9.0
    for name in ("seed", "b[/x]"):
        world.say(world.peers[name], Heartbeat(2))
    return world


def test_a_wide_table_shows_what_answers_look_like() -> None:
    world = trained()
    quality = world.state._statistics.qualities.of(world.peers["a"].peer)
    assert quality is not None
    quality.reward, quality.above, quality.tokens = 0.75, -0.25, 3.2
    text = seen(facts_of(world), width=PLAIN_COLUMNS)
    (row,) = [line for line in text.splitlines() if line.strip().startswith("● a ")]
    assert [word for word in row.split() if word in ("100%", "0.75", "-0.25", "3")][:4] == [
        "100%",
        "0.75",
        "-0.25",
        "3",
    ]
    assert "…" not in text
    assert " tokens " not in seen(facts_of(world), width=90)


def test_a_refit_shows_its_pause_and_what_it_computes_again() -> None:
    world = trained()
    facts = facts_of(world)
    facts["recompute_s"] = [1.5]
    facts["workers"][0]["recompute_s"] = 2.5
    text = seen(facts, width=PLAIN_COLUMNS)
    assert "100 ms + 1.5 s" in text
    assert "100 ms + 2.5 s" in text
    assert "…" not in text


def test_the_status_shows_a_silent_worker() -> None:
    world = trained()
    lines = [line.strip() for line in seen(facts_of(world)).splitlines()]
    text = "\n".join(lines)
    assert "step 3" in " ".join(text.split())
    assert "0: ███░░░░░  33%" in text
    assert "verified by 2 of 2, 1 kB in a chain" in text
    assert any(line.startswith("● b[/x]") for line in lines)
    assert any(
        line.startswith("! a silent for 9 s: its 2 leases go to others in 6 s") for line in lines
    )
    assert lines[-1] == "9 s ago  refit   b[/x], version 2: out of memory"
    assert "…" not in text


def test_the_status_shows_a_run_with_automatic_activation() -> None:
    world = trained()
    facts = facts_of(world)
    first, second = facts["workers"]
    text = (
        "it waits 1.0% of its time; 1 worker makes 3,600 trajectories/h, it needs 3,000, "
        + "and so on " * 10
    )
    facts["provision"] |= {
        "activation": "auto", "mu_pool": 1.0, "mu_target": 0.9, "why": "23% cheaper, by rho",
        "bottleneck": {"kind": "learner", "text": text},
    }  # fmt: skip
    facts["workers"] = [
        {**first, "alive": True, "mu": 1.0, "mu_sd": 0.1, "usd_per_h": 0.35},
        {**second, "active": False, "mu": 2.0, "mu_sd": None},
        {**second, "name": "c", "active": False, "leaving": True, "mu": None},
        {**second, "name": "d", "active": False, "leaving": True, "state": "gone"},
    ]
    lines = seen(facts).splitlines()
    at = next(number for number, line in enumerate(lines) if "bottleneck" in line)
    assert lines[at].startswith("  bottleneck    it waits 1.0% of its time; 1 worker makes 3,600")
    assert lines[at + 1].startswith(" " * 16 + "so on"), "long words go on below themselves"
    assert (
        "  activation    1 of 3 workers work, 3,600 trajectories/h; the target is 3,240; 23% cheaper"
        in seen(facts)
    )
    rows = {line.split()[1]: line for line in lines if line.startswith("● ")}
    assert " joined " in rows["a"]
    assert " 3,600 " in rows["a"]
    assert " 0.35 " in rows["a"]
    assert " standby " in rows["b[/x]"]
    assert " ~7,200 " in rows["b[/x]"], "only a guess"
    assert (" leaving " in rows["c"], " gone " in rows["d"]) == (True, True)
    assert "usd/h" not in seen(facts_of(trained()))


def test_workers_that_are_long_gone_are_counted() -> None:
    facts = facts_of(trained())
    first, second = facts["workers"]
    gone = {**first, "state": "gone", "alive": False}
    facts["workers"] = [
        second,
        {**gone, "name": "now", "silent_s": 99.0},
        *([{**gone, "silent_s": 999.0}] * 3),
    ]
    text = seen(facts)
    assert "● now " in text
    assert "● a " not in text
    assert "and 3 gone" in text


def test_the_picture_of_the_status_is_the_same_every_time() -> None:
    facts = facts_of(trained())
    assert svg(facts) == svg(facts)
    assert "bottleneck" in svg(facts)


def test_a_run_with_clients_shows_their_sessions_and_nothing_of_train_steps() -> None:
    text = seen(facts_of(serving()), width=PLAIN_COLUMNS)
    for word in ("bottleneck", "committed", "kappa", "buffered", "accepted", "reward"):
        assert word not in text
    assert "sessions 2" in " ".join(text.split())
    assert "calls that wait for the learner: 2; samples that wait for workers: 0" in text
    assert "org/base as version 1" in text
    ann, first, second, bob = (row_of(text, name) for name in ("ann", "train:0", "train:1", "bob"))
    assert ann[:9] == ["ann", "s1", "60", "s", "60", "s", "2", "models", "2"]
    assert first[:5] == ["train:0,", "rank", "8", "1", "100"]
    assert second[-3:] == ["1,", "0", "kB"]
    assert bob[-6:] == ["6", "2", "0", "1", "0", "0.03"]


def row_of(text: str, start: str) -> list[str]:
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith(start)]
    return row


def test_sessions_that_do_not_fit_on_the_terminal_are_counted() -> None:
    world = serving()
    for number in range(30):
        world.client("cat", f"c{number}")
    text = seen(facts_of(world), lines=40, width=PLAIN_COLUMNS)
    assert "● gpu-1" in text
    assert 4 <= text.count("\ncat ") < 30
    assert re.search(r"^  and \d+ more", text, re.MULTILINE)
    assert len(text.splitlines()) <= 40
    narrow = seen(facts_of(world), width=60)
    assert "train:1, rank 8" in narrow
    assert max(map(len, narrow.splitlines())) <= 60


def test_the_page_shows_what_the_terminal_shows() -> None:
    """Every key of the status that the terminal's view reads is read by the page's scripts too."""
    package = Path(echo2d.__file__).parent
    view = words_of((package / "views" / "status.py").read_text())
    page = words_of("".join(file.read_text() for file in (package / "web").glob("*.js")))
    keys = {path.rpartition(".")[2].removesuffix("[]") for path in pinned_keys()}
    # It has the curve of the rewards from the run's history, and of a
    # `Glance` what changes all the time.
    elsewhere = {"rewards", "payload_bytes", "buffered", "seed_usd_per_gb_up"}
    assert (keys & view) - page <= elsewhere
    for state in ("standby", "leaving", "away", "joined", "suspected", "gone"):
        assert state in page


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_the_status_shows_samples_between_two_turns_and_the_time_of_tools() -> None:
    facts = facts_of(World())
    facts["tasks"][0] |= {
        "name": "shop[/x]",
        "episodes": {"offered": 0, "parked": 1234, "waiting": 5, "tool_s_median": None, "tool_s_p90": None},
    }  # fmt: skip
    words = "shop[/x] 1,234 samples wait for the environment, 5 for a slot"
    assert words in " ".join(seen(facts).split())
    facts["tasks"][0]["episodes"] |= {"offered": 7, "tool_s_median": 0.25, "tool_s_p90": 18.0}
    text = " ".join(seen(facts).split())
    assert f"{words}, 7 offered to agents; a step takes it 250 ms, p90 18.0 s" in text
    assert "samples wait" not in seen(facts_of(World()))


def test_the_status_shows_what_the_seed_has_sent_and_its_cost() -> None:
    facts = facts_of(trained())
    assert "seed sent" not in seen(facts)
    facts |= {
        "seed_usd_per_gb_up": 0.09,
        "seed_copies": {"2": 3.0, "3": 1.04},
        "seed_usd": {"2": 0.086, "3": 0.03},
        "seed_sent_bytes": 16_960_000_000,
        "seed_usd_total": 1.5264,
    }
    assert "17.0 GB for 1.53 usd; version 3 1.0 times, 0.030 usd" in seen(facts)


def test_the_status_shows_rented_boxes_and_their_cost() -> None:
    box = {"label": "x-1", "provider": "x", "offer": "y", "ids": [], "state": "serving", "why": "", "usd_per_h": 0.75,
           "age_s": 1.0, "life_left_s": 9.0, "cost_usd": 0.1, "worker": "x-1", "idle_s": 2.0,
           "accepted": 7}  # fmt: skip
    renting = {"boxes": [box, box], "states": {"starting": 0, "serving": 2}, "usd_per_h": 1.5, "usd_per_h_max": 4.0,
               "spent_usd": 12.34, "usd_total_max": 200.0, "set_aside_usd": 9.0, "left_usd": 178.66,
               "committed_usd": 21.34, "why": "", "blind": [], "alerts": []}  # fmt: skip
    run = {
        "name": "digits",
        "model": "",
        "tasks": [],
        "software": "1.2",
        "started_at": 0.0,
        "changes": [],
    }
    process: dict[str, Any] = {"run_id": "run-1", "run": run, "disk": None, "expiring_tokens": [], "peer_faults": 0,
               "learner_silent_s": None, "renting": renting,
               "refused_peers": []}  # fmt: skip
    text = " ".join(seen({**facts_of(World()), **process}).split())
    assert (
        "2 boxes (2 serving), 1.50 of 4 usd/h; spent 12.34 of 200 usd, 9.00 set aside, 178.66 left"
        in text
    )
    assert "rented" not in seen(facts_of(World()))


def test_an_empty_run_is_shown_too() -> None:
    assert "no learner has opened a session" in seen(facts_of(World()))


def test_a_thousand_workers_fit_a_small_terminal() -> None:
    world = trained()
    facts = facts_of(world)
    worker = facts["workers"][0]
    facts["workers"] = [{**worker, "name": f"w{n}", "alive": n != 700} for n in range(1000)]
    facts["alerts"] = [
        {"kind": "worker_no_version", "subject": f"w{n}", "sentence": f"w{n} serves no version yet"}
        for n in range(24)
    ]
    for lines in (30, 40, 80):
        text = seen(facts, lines=lines)
        assert len(text.splitlines()) < lines
        assert "● w700 " in text, "the one in trouble comes first"
    assert "and 951 more" in text


def test_a_filter_shows_workers_by_name_id_or_state() -> None:
    facts = facts_of(trained())
    worker = facts["workers"][0]
    long_gone = {**worker, "name": "box-8", "state": "gone", "silent_s": 9e9}
    away = {**worker, "name": "box-9", "id": "f" * 32, "alive": False}
    facts["workers"] += [long_gone, away]
    for words in ("box-9", "f" * 8, "away"):
        text = seen(facts, only=words)
        assert "● box-9 " in text
        assert "● a " not in text
        assert "gone" not in text
    assert "● a " in seen(facts, only="")
    assert "and 1 gone" in seen(facts, only="box")
    print_status(facts, only="nobody")


def test_a_filter_narrows_the_answer_for_programs_too() -> None:
    facts = facts_of(trained())
    assert narrowed(facts, "") == facts
    assert [each["name"] for each in narrowed(facts, "b[/x")["workers"]] == ["b[/x]"]
    assert narrowed(facts, "nobody")["workers"] == []
    with pytest.raises(OperatorFault, match=r"'nobody' is in .* no worker; there is a, b\[/x\]"):
        narrowed(facts, "nobody", must=True)


def test_the_status_as_json_has_the_selected_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def status_once(_: object) -> dict[str, object]:
        return facts

    facts = facts_of(trained())
    monkeypatch.setattr(watch, "status_once", status_once)
    words = ["status", "--run-dir=run"]
    found = CliRunner().invoke(main, [*words, "--json", "--worker=b[/x"])
    assert [each["name"] for each in json.loads(found.output)["workers"]] == ["b[/x]"]
    for how in ([], ["--json"]):
        found = CliRunner().invoke(main, [*words, "--worker=nobody", *how])
        assert (found.exit_code, found.output.count("\n")) == (2, 1)
        assert "'nobody' is in the name, the id or the state of no worker" in found.output


def test_numbers_are_shown_with_their_units() -> None:
    assert [age(s) for s in (-1.0, 119.0, 120.0, 7200.0, 3e5)] == [
        "0 s",
        "119 s",
        "2 min",
        "2 h",
        "3 d",
    ]
    assert [seconds(s) for s in (None, 0.0123, 1.25)] == ["-", "12 ms", "1.2 s"]
    assert [size(n) for n in (500, 3.1e6, 2e9)] == ["0 kB", "3.1 MB", "2.0 GB"]


def test_the_rate_survives_a_restart() -> None:
    rate = TokenRate()
    for at, tokens in enumerate((0, 100, 0, 100)):
        found = rate.update(tokens, float(at))
    assert found == pytest.approx(36.0), "a counter that began anew is no negative rate"


def test_a_pause_keeps_the_last_picture_on_a_terminal() -> None:
    world = trained()
    console = Console(
        file=io.StringIO(), force_terminal=True, width=110, height=50, color_system=None
    )
    with Screen(as_json=False, console=console) as screen:
        screen.show(facts_of(world), now=100.0)
        assert isinstance(console.file, io.StringIO)
        console.file.truncate(0)
        screen.away("connection refused", now=112.0)
        shown = console.file.getvalue()
    assert "coordinator away since 12 s, trying again: connection refused" in shown
    assert "● a " in shown


def test_builds_are_shown_if_they_differ() -> None:
    facts = facts_of(trained())
    assert "build" not in seen(facts)
    facts["workers"][0]["build"] = "0.9.1"
    text = seen(facts)
    assert "build" in text
    assert "0.9.1" in text


@pytest.mark.parametrize("width", [60, 80, 110, 140, 200])
@pytest.mark.parametrize("builds", [1, 2])
def test_no_word_and_no_number_of_the_status_is_truncated(width: int, builds: int) -> None:
    world = trained()
    facts = facts_of(world)
    for worker in facts["workers"]:
        worker |= {"usd_per_h": 12.5, "accepted": 1_234_567, "cost_usd": 12_345.67, "reward": 0.25}
        worker |= {"name": f"a-box-{worker['name']}", "mu": 31.5, "mu_sd": 0.5}
    if builds == 2:
        facts["workers"][0]["build"] = "0.1.0+gc5f633a6"
    facts["learner"] |= {"steps": 2000, "eta_s": 3600.0 * 30}
    text = seen(facts, width=width)
    assert "…" not in text
    for worker in facts["workers"]:
        assert worker["name"] in text
    assert ("0.1.0+gc5f633a6" in text) == (builds == 2)
    assert "3 of 2000" in text
    assert max(map(len, text.splitlines())) <= width


def test_the_variable_columns_sets_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert plain_console().width == PLAIN_COLUMNS
    monkeypatch.setenv("COLUMNS", "200")
    assert plain_console().width == 200
