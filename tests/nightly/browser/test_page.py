"""The dashboard as a person uses it: logging in, reading, keys, hostile names, light and dark, a phone."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.coordinator.events import CoordinatorAction, CoordinatorEvent
from echo2d.core.protocol.builds import Build
from echo2d.runtime.run_dir.tokens import create_token
from echo2d.this_build import THIS_BUILD
from echo2d_lab.standins.memory_run import MemoryRun
from tests.support.coordinator_world import World, train
from tests.support.page_site import PageSite, site
from tests.support.polling import poll
from tests.support.status import trained
from tests.support.tinker_clients import serving

NAME = "<img src=x onerror=\"document.title='bad'\">"
HOSTILE = f"{NAME}<script>document.title='bad'</script>"
WIDE = {"width": 1400, "height": 1000}
PHONE = {"width": 390, "height": 844}


class LargeRun(World):
    """Checks nothing after an event: that takes as long as there are workers."""

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        self.actions = MemoryRun.handle(self, event)
        return self.actions


def run_of(*names: str, steps: int = 3) -> World:
    """A run with these workers that has trained so many steps."""
    world = LargeRun() if len(names) > 100 else World()
    world.connect("seed", kind="seed")
    for name in names:
        world.connect(name)
    train(world, steps)
    world.drain()
    return world


def history(rewards: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"step": step, "reward": reward, "staleness": 1.0, "t_train_s": 2.0, "wait_s": 0.5,
         "tokens_per_s": 1000.0, "t_bcast_s": 0.3}
        for step, reward in enumerate(rewards, 1)
    ]  # fmt: skip


@contextmanager
def opened(browser: Any, made: PageSite, token: str = "viewer", **options: Any) -> Iterator[Any]:
    """A page that somebody has logged in to. A mistake of its scripts fails the test."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    page, mistakes = context.new_page(), list[str]()
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("console", lambda said: mistakes.append(said.text) if said.type == "error" else None)
    page.goto(made.url)
    page.fill("#secret", made.secret(token))
    page.press("#secret", "Enter")
    page.wait_for_selector("#facts:not([hidden])")
    yield page
    context.close()
    # A test may try what the policy or the coordinator forbids; the browser says so.
    forbidden = ("TrustedHTML", "status of 400")
    assert [each for each in mistakes if not any(words in each for words in forbidden)] == []


def names_in_table(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        "#workers tbody tr td:first-child", "cells => cells.map(cell => cell.textContent)"
    )
    return found


def test_a_person_logs_in_with_a_token(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, run_of("gpu-1")) as made:
        page = browser.new_context(viewport=WIDE).new_page()
        page.goto(made.url)
        assert "jq -r .secret" in page.inner_text("#login")
        assert not page.is_visible("#facts")
        page.fill("#secret", "wrong")
        page.press("#secret", "Enter")
        page.wait_for_selector("#fault:not(:empty)")
        assert page.is_visible("#login")
        page.fill("#secret", f" {made.secret()} ")
        page.press("#secret", "Enter")
        page.wait_for_selector("#facts:not([hidden])")
        assert not page.is_visible("#login")
        page.reload()
        page.wait_for_selector("#facts:not([hidden])")
        other = page.context.new_page()
        other.goto(made.url)
        assert other.is_visible("#login"), "another tab does not know the secret"
        page.click("#leave")
        assert page.is_visible("#login")
        assert page.evaluate("sessionStorage.length") == 0
        page.context.close()


@pytest.mark.probe
def test_the_page_shows_the_figures_of_the_status(browser: Any, tmp_path: Path) -> None:
    world = run_of("gpu-1", "gpu-2")
    with (
        site(tmp_path, world, steps=history([0.1, 0.4, 0.5])) as made,
        opened(browser, made) as page,
    ):
        text = page.inner_text("#facts")
        status = world.state.status(now=world.now)
        assert status.newest_version is not None
        for words in (
            status.provision.bottleneck.text,
            f"v{status.newest_version.version}",
            "2 working of 2 here",
            "T_verify, median, p95",
            f"{status.totals.trained}, {status.totals.dropped}",
        ):
            assert words in text
        assert page.inner_text("#tiles > div:first-child dd") == "3"
        assert made.opened.run.run_id in page.inner_text("header")
        assert names_in_table(page) == ["gpu-1", "gpu-2"]
        assert re.search(r"version \d+: 2 of 2 verified", page.inner_text("#tree-about"))


def test_a_run_with_clients_shows_their_sessions_and_nothing_of_train_steps(
    browser: Any, tmp_path: Path
) -> None:
    with site(tmp_path, serving()) as made, opened(browser, made) as page:
        rows = [line.split("\t") for line in page.inner_text("#clients tbody").splitlines()]
        assert [(row[0], row[4], row[6]) for row in rows if len(row) > 4] == [
            ("ann", "2 models", "200"),
            ("", "train:0, rank 8", "100"),
            ("", "train:1, rank 8", "100"),
            ("bob", "-", "0"),
        ]
        assert page.inner_text("#clients-about") == "workers hold org/base as v1"
        tiles = page.inner_text("#tiles").lower()
        assert "sessions" in tiles
        assert "optimizer steps" in tiles
        for words in ("train steps", "reward", "staleness", "bubble"):
            assert words not in tiles
        for part in ("#curves-section", "#staleness-section", "#capacity-section"):
            assert not page.is_visible(part)
        assert "reward" not in page.inner_text("#workers").lower()
        assert "calls that wait for the learner: 2" in page.inner_text("#bottleneck")
        assert no_hole(page, "tiles")


def test_the_page_updates_by_itself(browser: Any, tmp_path: Path) -> None:
    world = run_of("gpu-1")
    with site(tmp_path, world) as made, opened(browser, made) as page:
        made.change(lambda: world.connect("late"))
        page.wait_for_selector("#workers td:text-is('late')")
        page.wait_for_selector("#alerts :text('late serves no version yet')")
        assert page.inner_text("#live") == "\u25cf live"


def test_the_page_says_that_the_coordinator_is_away(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, run_of("gpu-1")) as made:
        page = browser.new_context(viewport=WIDE).new_page()
        page.goto(made.url)
        page.fill("#secret", made.secret())
        page.press("#secret", "Enter")
        page.wait_for_selector("#facts:not([hidden])")
    page.wait_for_selector("#fault:has-text('has not answered for')")
    assert page.inner_text("#live") == "\u25b2 not live"
    assert page.is_visible("#facts"), "what was known stays"
    page.context.close()


def test_names_of_the_run_are_shown_as_text_and_never_as_markup(
    browser: Any, tmp_path: Path
) -> None:
    world = run_of(NAME, "gpu-2")
    world.state._statistics.fault("lease", HOSTILE)
    sample = {"reward": 1.0, "versions": [3], "finish": "stop", "answer": HOSTILE}
    line = {"step": 3, "prompt": HOSTILE, "samples": [sample]}
    changes: dict[str, Any] = {"samples.viewers": True}
    with (
        site(tmp_path, world, samples=[line], **changes) as made,
        opened(browser, made) as page,
    ):
        assert NAME in names_in_table(page)
        page.click("#workers tbody tr:has-text('<img') >> nth=0")
        assert NAME in page.inner_text("#detail-name")
        page.keyboard.press("Escape")
        page.click("#samples summary")
        page.wait_for_selector("#samples-groups pre")
        assert page.inner_text("#samples-groups pre >> nth=0") == HOSTILE
        assert HOSTILE in page.inner_text("#faults")
        page.fill("#filter", NAME)
        assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert "bad" not in page.title()
        refused = page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } }"
        )
        assert refused == "TypeError", "the policy forbids HTML out of text"


@pytest.mark.parametrize("shown", [False, True])
def test_viewers_see_samples_only_if_the_operator_says_so(
    browser: Any, tmp_path: Path, *, shown: bool
) -> None:
    sample = {"reward": 1.0, "versions": [3], "finish": "stop", "answer": "seven"}
    line = {"step": 3, "prompt": "3 + 4 =", "samples": [sample]}
    changes: dict[str, Any] = {"samples.viewers": shown}
    with site(tmp_path, run_of("a"), samples=[line], **changes) as made:
        context = browser.new_context(viewport=WIDE)
        page = context.new_page()
        page.goto(made.url)
        page.fill("#secret", made.secret())
        page.press("#secret", "Enter")
        page.click("#samples summary")
        page.wait_for_selector("#samples-groups pre" if shown else "#samples-groups p")
        text = page.inner_text("#samples-groups")
        assert ("3 + 4 =" in text, "samples.viewers = true" in text) == (shown, not shown)
        context.close()


def test_a_curve_shows_rewards_below_zero(browser: Any, tmp_path: Path) -> None:
    rewards = [-0.5, -0.4, -0.5, 0.1]
    with (
        site(tmp_path, run_of("a"), steps=history(rewards)) as made,
        opened(browser, made) as page,
    ):
        chart = page.locator(".chart").first
        heights = [
            float(y)
            for y in re.findall(r" ([\d.]+)(?=L|$)", chart.locator("path").first.get_attribute("d"))
        ]
        assert len(heights) == 4
        assert heights[0] == heights[2] > heights[1] > heights[3]
        zero = float(chart.locator("line.zero").get_attribute("y1"))
        assert heights[1] > zero > heights[3], "the axis lies between them"
        labels = chart.locator("text").all_text_contents()
        assert {"-0.4", "0.0"} <= set(labels)
        assert "lowest -0.500" in chart.locator("svg").get_attribute("aria-label")


def test_scores_of_evaluations_are_drawn_as_a_curve(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, trained()) as made, opened(browser, made) as page:
        chart = page.locator(".chart:has-text('Evaluations')")
        chart.locator("circle").first.wait_for()
        assert "held" in page.inner_text("#evaluations")
        assert chart.locator("output").inner_text() == "held 0.000"


def learning(steps: int, **more: Any) -> list[dict[str, Any]]:
    """Lines of a run whose learner says what it measured, and whose rewards have parts and tags."""
    facts = {
        "entropy": 1.5, "kl_rollout": 0.002, "grad_norm": 0.25, "loss": -0.5, "mfu": 0.4,
        "tokens": 84, "trajectories": 4,
        "parts": {"right": 0.5, "short": 0.25}, "reward_by_tag": {"level=1": 0.5}, **more,
    }  # fmt: skip
    return [{**line, **facts} for line in history([0.5] * steps)]


def captions(page: Any) -> dict[str, str]:
    """What stands above each curve that is shown, by its title."""
    shown = page.locator(".chart:not([hidden])")
    words = (
        "all => all.map(one => [...one.querySelectorAll('b, output')].map(each => each.innerText))"
    )
    return dict(shown.evaluate_all(words))


@pytest.mark.parametrize(
    ("more", "parts", "kl"),
    [
        ({}, "right 0.500\u2002short 0.250", ""),
        (
            {"kl_base": 0.01, "parts": {HOSTILE: 0.5}},
            f"{HOSTILE[:19]}\u2026 0.500",
            "\u2002learner to base 0.0100 nats",
        ),
    ],
)
def test_the_page_shows_the_learners_figures_and_the_parts_of_rewards(
    browser: Any, tmp_path: Path, more: dict[str, Any], parts: str, kl: str
) -> None:
    with (
        site(tmp_path, run_of("a"), steps=learning(3, **more)) as made,
        opened(browser, made) as page,
    ):
        page.wait_for_selector(".chart:has-text('Gradient norm') path", state="attached")
        found = captions(page)
        assert found["Entropy of the policy, nats/token"] == "1.500 nats"
        assert found["KL, nats/token"] == f"rollout to learner 0.0020 nats{kl}"
        assert found["Gradient norm before the clip"] == "0.250"
        assert found["Loss"] == "-0.5000"
        assert found["MFU, % of the devices' peak"] == "40.0 %"
        assert found["Answer length, tokens"] == "21.0 tokens"
        assert found["Parts of the reward, means of a step"] == parts
        assert found["Reward by tag, means of a step"] == "level=1 0.500"


@pytest.mark.parametrize("told", [True, False])
def test_curves_and_tiles_leave_no_gap_in_the_layout(
    browser: Any, tmp_path: Path, *, told: bool
) -> None:
    steps = learning(3) if told else history([0.5] * 3)
    with site(tmp_path, run_of("a"), steps=steps) as made, opened(browser, made) as page:
        page.wait_for_selector(".chart path", state="attached")
        assert len(captions(page)) == (14 if told else 7)
        for width in (390, 900, 1200, 1400, 1900):
            page.set_viewport_size({"width": width, "height": 1000})
            for box in ("charts", "tiles"):
                poll(partial(no_hole, page, box))


def no_hole(page: Any, box: str) -> bool:
    """Whether each row of its children ends at its right edge."""
    found: bool = page.evaluate(
        """id => {
            const box = document.getElementById(id), rows = new Map();
            for (const {top, width, right} of [...box.children].map(each => each.getBoundingClientRect())) {
                if (width) rows.set(Math.round(top), Math.max(rows.get(Math.round(top)) ?? 0, right));
            }
            return [...rows.values()].every(end => Math.abs(end - box.getBoundingClientRect().right) < 1);
        }""",
        box,
    )
    return found


def test_a_chart_shows_the_values_under_the_cursor(browser: Any, tmp_path: Path) -> None:
    with (
        site(tmp_path, run_of("a"), steps=history([-0.5, 0.25, 0.75])) as made,
        opened(browser, made) as page,
    ):
        chart = page.locator(".chart").first
        box = chart.locator("svg").bounding_box()
        assert chart.locator("output").inner_text() == "0.750"
        page.mouse.move(box["x"] + 46, box["y"] + 30)
        assert chart.locator("output").inner_text() == "step 1:\u2002-0.500"
        page.mouse.move(box["x"] + 46, box["y"] - 60)
        assert chart.locator("output").inner_text() == "0.750"
        chart.locator("svg").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert chart.locator("output").inner_text() == "step 2:\u20020.250"
        page.keyboard.press("Home")
        assert chart.locator("output").inner_text() == "step 1:\u2002-0.500"


def test_keys_filter_and_select_workers(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, run_of("gpu-1", "gpu-2", "home-1")) as made, opened(browser, made) as page:
        page.keyboard.press("/")
        page.keyboard.type("gpu")
        assert names_in_table(page) == ["gpu-1", "gpu-2"]
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.inner_text("#detail-name").strip().endswith("gpu-2")
        assert page.evaluate("document.activeElement.id") == "detail-name"
        page.keyboard.press("Escape")
        assert not page.is_visible("#detail")
        assert page.evaluate("document.activeElement.dataset.id") is not None, "back in its row"
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.id") == "filter"
        page.keyboard.press("Escape")
        assert names_in_table(page) == ["gpu-1", "gpu-2", "home-1"]
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        assert page.is_visible("#keys")
        page.keyboard.press("Escape")
        assert not page.is_visible("#keys")


def test_every_control_can_be_reached_by_tab(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, run_of("gpu-1", "gpu-2")) as made, opened(browser, made) as page:
        page.focus(".skip")
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "(e => e.id || e.closest('[id]')?.id || e.tagName)(document.activeElement)"
                )
            )
        places = ["theme", "keys-open", "leave", "charts", "filter", "states", "workers", "samples"]
        firsts = [reached.index(place) for place in places]
        assert firsts == sorted(firsts), "from top to bottom"
        rows = page.eval_on_selector_all(
            "#workers tbody tr", "rows => rows.filter(row => row.tabIndex === 0).length"
        )
        assert rows == 1, "one stop for the whole table"


def test_workers_are_sorted_and_their_states_are_shown(browser: Any, tmp_path: Path) -> None:
    world = run_of("gpu-2", "gpu-10", "home-1")
    world.handle(PeerDisconnected(world.peers["home-1"].session, "closed"))
    with site(tmp_path, world) as made, opened(browser, made) as page:
        assert names_in_table(page) == ["home-1", "gpu-2", "gpu-10"], (
            "trouble first, then by number"
        )
        page.click("#workers th button:text-is('worker')")
        assert names_in_table(page) == ["gpu-2", "gpu-10", "home-1"]
        assert page.get_attribute("#workers th >> nth=0", "aria-sort") == "ascending"
        page.click("#workers th >> nth=0 >> button")
        assert names_in_table(page) == ["home-1", "gpu-10", "gpu-2"]
        page.click("#states button:has-text('away')")
        assert names_in_table(page) == ["home-1"]
        assert page.get_attribute("#states button:has-text('away')", "aria-pressed") == "true"


def test_builds_have_a_column_if_they_differ(browser: Any, tmp_path: Path) -> None:
    world = run_of("gpu-1", "gpu-2")
    one, two = world.state._members.workers()
    one.build = two.build = THIS_BUILD
    with site(tmp_path, world) as made, opened(browser, made) as page:
        assert "build" not in page.inner_text("#workers thead")

        def changes() -> None:
            two.build, two.engine.disk_free = Build(9, 9, "0.0.9"), 3 * 10**9

        made.change(changes)
        page.wait_for_selector("#workers td:text-is('0.0.9')")
        page.click("#workers tbody tr:has-text('gpu-2')")
        assert "0.0.9" in page.inner_text("#detail-facts")
        assert "3.00 GB" in page.inner_text("#detail-facts")


def test_the_page_shows_five_hundred_workers(browser: Any, tmp_path: Path) -> None:
    world = run_of(*(f"gpu-{number}" for number in range(500)), steps=1)
    with site(tmp_path, world) as made, opened(browser, made) as page:
        assert len(names_in_table(page)) == 20
        page.click("#more")
        assert len(names_in_table(page)) == 500
        assert page.locator("#tree .cells i").count() == 501
        page.focus("#tree")
        page.keyboard.press("ArrowRight")
        assert re.match(r"gpu-\d+: verified; from ", page.inner_text("#tree-said"))
        page.fill("#filter", "gpu-49")
        assert len(names_in_table(page)) == 11
        page.click("#tree .cells i >> nth=7")
        assert page.is_visible("#detail")


def contrast(page: Any, selector: str) -> float:
    """The contrast ratio between a text and the card on which it stands (WCAG 2)."""
    colours = page.evaluate(
        """selector => {
            const node = document.querySelector(selector), card = node.closest("section, header, #tiles > div");
            return [node, card].map((each, at) => getComputedStyle(each)[at ? "backgroundColor" : "color"]);
        }""",
        selector,
    )
    lights = []
    for colour in colours:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_light_and_dark(browser: Any, tmp_path: Path, scheme: str) -> None:
    with (
        site(tmp_path, run_of("a"), steps=history([0.1, 0.2])) as made,
        opened(browser, made, color_scheme=scheme) as page,
    ):
        back = "getComputedStyle(document.body).backgroundColor"
        as_system = page.evaluate(back)
        for selector in ("#tiles dt", "#tiles dd", "#workers th", "#workers td .good", "#live"):
            assert contrast(page, selector) >= 4.5, selector
        page.keyboard.press("t")
        page.keyboard.press("t")
        assert page.inner_text("#theme") == "theme: dark"
        assert (page.evaluate(back) == as_system) == (scheme == "dark")
        page.reload()
        page.wait_for_selector("#facts:not([hidden])")
        assert page.inner_text("#theme") == "theme: dark", "it is remembered"


def test_the_page_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    world = run_of("gpu-1", "w" * 60)
    with site(tmp_path, world) as made, opened(browser, made, viewport=PHONE) as page:
        assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]
        page.click("#workers tbody tr >> nth=0")
        box = page.locator("#detail").bounding_box()
        assert (box["x"], box["width"]) == (0, PHONE["width"])


def test_controls_pictures_and_states_have_accessible_names(browser: Any, tmp_path: Path) -> None:
    """For those who do not see it: controls, pictures and states."""
    with (
        site(tmp_path, run_of("a"), steps=history([0.1, 0.2])) as made,
        opened(browser, made) as page,
    ):
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, [role=img], progress, section, aside, dialog")]
                .filter(node => !(node.textContent.trim() && node.tagName === "BUTTON") && !node.labels?.length
                    && !node.getAttribute("aria-label") && !node.getAttribute("aria-labelledby"))
                .map(node => node.outerHTML.slice(0, 80))"""
        )
        assert nameless == []
        assert page.inner_text("#workers td:nth-child(2)").endswith("joined"), "no colour alone"
        assert page.get_attribute("html", "lang") == "en"


@pytest.mark.may_block
def test_an_operator_drains_a_worker(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, run_of("gpu-1")) as made:
        out = made.run_dir / "tokens" / "op.token"
        create_token(
            made.run_dir,
            "op",
            role="operator",
            url=made.url,
            out=out,
            max_workers=None,
            expires="1d",
        )
        poll(lambda: made.knows("op"))
        with opened(browser, made, token="op") as page:
            page.click("#workers tbody tr")
            page.click("#detail-orders button:text-is('drain')")
            page.click("#detail-orders button:text-is('no')")
            page.click("#detail-orders button:text-is('drain')")
            with page.expect_request(re.compile(r"/v1/workers/[^/]+/drain$")) as asked:
                page.click("#detail-orders button:text-is('drain gpu-1')")
            assert asked.value.method == "POST"
            # This worker is of a scripted run, and has enrolled nowhere.
            page.wait_for_selector("#detail-orders [role=status]:has-text('enrolled')")


def test_a_viewer_gives_no_orders(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, run_of("gpu-1")) as made, opened(browser, made) as page:
        page.click("#workers tbody tr")
        assert page.locator("#detail-orders button").count() == 0
        assert "operator" in page.inner_text("#detail-orders")
