"""The renter beside a coordinator, with commands that are processes; its cloud is a folder with a file per box."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.demand import (
    NEED_MAX,
    Assumptions,
    Candidate,
    CapacityPlanner,
)
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.rules.prices import Price
from echo2d.core.status.schema import ProcessStatus, ProvisionStatus, VersionBytes, VersionStatus
from echo2d.errors import StoreFault
from echo2d.net.security.auth import enrol_proof, public_bytes, read_token_file
from echo2d.runtime.renting import renter
from echo2d.runtime.renting.renter import (
    Renter,
    boxes_left_alone,
    gb_per_h,
    margin_of,
    open_renter,
    rented,
    rented_lines,
)
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from tests.support.coordinator_world import World, rules
from tests.support.polling import HANG_S

CLOUD = """
case $1 in
start) {start} echo "$ECHO2D_TOKEN_FILE" > "$BOXES/$ECHO2D_LABEL" ;;
stop) rm -f "$BOXES/$ECHO2D_LABEL" ;;
list) for box in "$BOXES"/*; do
    [ -e "$box" ] && printf '{{"label": "%s", "id": "i-1"}}\n' "${{box##*/}}"
    done; true ;;
esac
"""
CONFIG = """
[run]
run_dir = "{root}/run"
snapshot_root = "{root}"
[sampling]
vocab_size = 100
[task]
kind = "echo2d_lab.bench.lab.stub_task:StubTask"
[rent]
usd_per_h = 1.0
usd_total = 10.0
patience_s = 0.0
idle_s = 0.5
drain_s = 60.0
[[provider]]
name = "here"
kind = "exec"
start = ["sh", "{root}/cloud.sh", "start"]
stop = ["sh", "{root}/cloud.sh", "stop"]
list = ["sh", "{root}/cloud.sh", "list"]
timeout_s = 120.0
settle_s = 0.1
list_every_s = 0.1
[[provider.offer]]
name = "box"
usd_per_h = 0.5
trajectories_per_h = 3600
max = 1
"""


class Site:
    """A run directory, a cloud, and the status that a coordinator would show."""

    def __init__(self, root: Path) -> None:
        self.root, self.boxes = root, root / "boxes"
        self.boxes.mkdir()
        self.cloud()
        (root / "run.toml").write_text(CONFIG.format(root=root))
        self.config = CoordinatorConfig.load(root / "run.toml")
        self.run = RunDirectory(self.config.run.run_dir)
        self.access = AccessTable(self.run)
        self.told: list[PeerId] = []
        # A learner has just called; nothing is measured, and no worker is here.
        self.status = replace(
            World().state.status(),
            process=ProcessStatus(run_id=self.run.run_id, peer_faults=0, learner_silent_s=0.0),
        )

    def cloud(self, start: str = "") -> None:
        (self.root / "cloud.sh").write_text(CLOUD.format(start=start))

    @asynccontextmanager
    async def renting(self) -> AsyncIterator[Renter]:
        async with open_renter(
            self.config, self.run, self.access, url="http://127.0.0.1:1"
        ) as renter:
            task = asyncio.ensure_future(renter.rent(lambda: self.status, self.plan_removal))
            try:
                yield renter
            finally:
                task.cancel()
                (self.root / "over").touch()
                await asyncio.gather(task, return_exceptions=True)

    async def plan_removal(self, peer: PeerId, why: str) -> None:
        assert why
        self.told.append(peer)
        self.worker(leaving=True)

    def there(self) -> list[Path]:
        return list(self.boxes.iterdir())

    async def book(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await asyncio.to_thread(rented, self.config))["boxes"]
        return found

    def worker(self, **changes: Any) -> None:
        """Its one worker is like this from now on."""
        (worker,) = self.status.workers
        self.status = replace(self.status, workers=(replace(worker, **changes),))

    def join(self, label: str) -> PeerId:
        """Its worker, with the credential that its box was given."""
        token = read_token_file(self.run.token_path(label))
        key = Ed25519PrivateKey.generate()
        proof = enrol_proof(key, token.secret)
        peer = self.access.enrol(token.secret, public_bytes(key), proof, now_s=time.time())
        world = World()
        world.connect("box")
        self.status = replace(self.status, workers=world.state.status().workers)
        self.worker(id=peer, serving=VersionStatus(0, "", 1), leased=2)
        return peer


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("BOXES", str(tmp_path / "boxes"))
    monkeypatch.setattr(renter, "_TICK_S", 0.05)
    return Site(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - what processes do, nothing tells
            await asyncio.sleep(0.02)


async def test_a_leaving_boxs_worker_is_notified_and_the_box_stops_when_it_holds_nothing(
    site: Site,
) -> None:
    async with site.renting() as renter:
        await until(lambda: renter.status().states["seen"] == 1)
        (box,) = site.there()
        peer = await asyncio.to_thread(site.join, box.name)
        await until(lambda: renter.status().states["serving"] == 1)
        site.worker(leased=0, running=2)  # a call of the gateway is no work of the run
        provision = replace(site.status.provision, shortfall=-1.0, mu_available=2.0)
        site.status = replace(site.status, provision=provision)
        await until(lambda: bool(site.told))
        assert site.told == [peer]
        assert renter.status().states["leaving"] == 1
        assert box.exists()
        site.worker(running=0)
        await until(lambda: not box.exists())
        site.worker(alive=False, state="gone", serving=None)
        await until(lambda: not renter.status().boxes)
        await until(lambda: not site.run.token_path(box.name).exists())


async def test_a_box_that_cannot_be_written_to_the_book_is_not_started(site: Site) -> None:
    async with open_renter(site.config, site.run, site.access, url="http://127.0.0.1:1") as renter:
        renter._store._db.execute("PRAGMA query_only = 1")
        with pytest.RaisesGroup(StoreFault):
            await renter.rent(lambda: site.status, site.plan_removal)
    assert (await site.book(), site.there()) == ([], [])


async def test_a_credential_in_a_commands_error_is_not_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.cloud(
        start='sed -n \'s/.*"secret": *"\\([^"]*\\)".*/bad token \\1/p\' $ECHO2D_TOKEN_FILE >&2; exit 1;'
    )
    with caplog.at_level(logging.INFO):
        async with site.renting() as renter:
            await until(lambda: "failed" in caplog.text and not renter.status().boxes)
    assert "(secret)" in caplog.text
    assert [
        record for record in caplog.records if " why=nothing can be measured" in record.getMessage()
    ]


async def test_a_box_started_while_the_coordinator_died_is_found_again(site: Site) -> None:
    """After the row, before or after the command: the next one cannot know which."""
    site.cloud(start=f"until [ -e {site.root}/over ]; do sleep 0.02; done;")
    async with site.renting() as renter:
        await until(lambda: renter.status().states["starting"] == 1)
    (left,) = await site.book()
    (site.boxes / left["label"]).write_text("made all the same")
    async with site.renting() as renter:
        await until(lambda: renter.status().states["seen"] == 1)
        assert [box.label for box in renter.status().boxes] == [left["label"]]


async def test_only_one_box_is_started_while_lists_show_nothing(site: Site) -> None:
    (site.root / "cloud.sh").write_text(
        (site.root / "cloud.sh").read_text().replace("printf", "true")
    )
    async with site.renting() as renter:
        await until(lambda: any(each.kind == "renting_doubts" for each in renter.status().alerts))
        assert len(site.there()) == 1


async def test_a_read_only_command_creates_nothing_and_a_coordinator_without_rent_warns(
    site: Site,
) -> None:
    async with site.renting() as renter:
        await until(lambda: renter.status().states["seen"] == 1)
    assert await asyncio.to_thread(boxes_left_alone, site.config) == "1 boxes, 0.5 usd/h"
    lines = rented_lines(await asyncio.to_thread(rented, site.config))
    assert lines[0] == "spent 0.01 of 10 usd; 1 boxes may be there, 0.5 usd/h"
    elsewhere = replace(site.config, run=replace(site.config.run, run_dir=site.root / "elsewhere"))
    assert rented_lines(await asyncio.to_thread(rented, elsewhere)) == [
        "spent 0.00 of 10 usd; nothing is there"
    ]
    assert not (site.root / "elsewhere").exists()


# --- the need

NOTHING_KNOWN = World().state.status()


def provision(t_bcast_s: float) -> ProvisionStatus:
    """The status of a run that takes 10 trajectories/s and has workers for 2."""
    known = CapacityPlanner(
        rules(trajectories_per_step=100, staleness_max=4, group_size=1),
        Measurements(1),
        Assumptions(10.0, t_bcast_s),
    )
    here = [Candidate("w", 2.0, Price(1.0))]
    known.price(here, 1)
    balance = known.balance(known.offers(here, None), ["w"], 1)
    return replace(
        NOTHING_KNOWN.provision,
        mu_min=balance.mu_min,
        mu_available=balance.mu_available,
        shortfall=known.shortfall(here, 1),
    )


def test_the_reserve_for_noise_is_what_gamma_adds() -> None:
    enough = provision(0.0)
    assert enough.shortfall is not None
    target = enough.shortfall + 1.98
    assert 9.0 < target < 12.0
    assert margin_of(enough) == pytest.approx(target / 11.0)


def test_a_need_that_hardly_any_pool_meets_is_not_below_the_reserve_for_noise() -> None:
    """Where almost nothing would be enough, something is rented all the same."""
    hopeless = provision(19.99)
    assert (hopeless.mu_min or 0.0) > 50 * 10.0
    assert 0 < margin_of(hopeless) < (hopeless.shortfall or 0.0) <= NEED_MAX * 10.0


def test_the_reserve_for_noise_is_zero_before_the_first_measurement() -> None:
    assert margin_of(NOTHING_KNOWN.provision) == 0.0


def test_traffic_of_versions_costs_their_median_size_once_a_publish_period() -> None:
    assert gb_per_h(NOTHING_KNOWN) == 0.0
    sizes = {0: VersionBytes(9 * 10**9, 9 * 10**9), 1: VersionBytes(10**9, 9 * 10**9)}
    sizes[2] = sizes[1]
    known = replace(NOTHING_KNOWN, version_bytes=sizes, t_train_s=(30.0,) * 3, publish_every=2)
    assert gb_per_h(known) == pytest.approx(60.0)
