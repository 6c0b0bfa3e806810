"""Deltas at workers: applied to the version that the worker holds, to a damaged one, and not to another one."""

import asyncio
import dataclasses
from pathlib import Path

from echo2d.core.base.ids import Digest, PeerId
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    FormEncoded,
    RefitDone,
    VersionVerified,
)
from echo2d.core.weights.form import FormFacts
from echo2d.core.weights.signed_index import Root
from echo2d.store.disk import write_at
from echo2d.store.snapshots import build_manifest
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_model, a_seed, a_worker, spread


async def spread_delta(
    double: CoordinatorDouble, base: Digest, *chain: PeerId, base_path: str = "versions/0"
) -> tuple[FormFacts, Digest, Path]:
    """Publish version 0 with another config.json as version 1, a delta from version 0 or another one."""
    path, _ = await a_model(double, 0, folder="1")
    await asyncio.to_thread(
        (path / "config.json").write_text, '{"architectures": ["Qwen3ForCausalLM"], "x": 1}'
    )
    digest = (await asyncio.to_thread(build_manifest, path)).digest
    facts = dataclasses.replace(double.facts(1, 2), kind="delta", base_digest=base)
    double.start_form(facts)
    double.chain(facts.form, chain, plan=2)
    order = double.order(facts, digest, path)
    double.send(chain[0], dataclasses.replace(order, kind="delta", base_path=base_path))
    return facts, digest, path


async def test_a_delta_form_is_applied_to_the_held_version(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        chain = [names["seed"], names["one"]]
        _, base = await spread(double, 0, *chain)
        await double.until_said(RefitDone)
        _, digest, _ = await spread_delta(double, base, *chain)
        done = await double.until_said(RefitDone, count=2)
        assert (done.digest, done.memory_ok) == (digest, True)
        assert (await double.until_said(FormEncoded, count=2)).wire_bytes < 2000


async def test_only_the_damaged_chunk_of_a_rotten_base_is_fetched_in_full(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with (
        a_seed(double) as seed,
        a_worker(double, tmp_path / "one") as one,
        a_worker(double, tmp_path / "two") as two,
    ):
        names = await double.peers(3)
        chain = [names[name] for name in ("seed", "one", "two")]
        _, base = await spread(double, 0, *chain)
        await double.until_said(RefitDone, count=2)
        [slot] = one._state._versions._snapshots._paths.values()
        await asyncio.to_thread(write_at, Path(slot) / "model-0.safetensors", b"rot", 3000)
        _, digest, path = await spread_delta(double, base, *chain)
        await double.until_said(VersionVerified, names["two"], count=2)
        failed = await double.until_said(ApplyFailed, names["one"])
        assert (failed.lacks_base, failed.reason) == (
            True,
            "the current slot is damaged under 1 delta chunks",
        )

        full = double.facts(1, 2)
        double.start_form(full)
        double.send(chain[0], double.order(full, digest, path))
        await double.until(lambda: Root.decode(double.roots[-1].root).form == full.form)
        double.chain(full.form, [chain[0], chain[2], chain[1]], plan=3)
        done = await double.until_said(RefitDone, names["one"], count=2)
        assert (done.digest, done.memory_ok) == (digest, True)
        wire_bytes = (await double.until_said(FormEncoded, count=3)).wire_bytes
        assert seed._receiver._sent.get(full.form, 0) < 0.1 * wire_bytes, (
            "who has the version makes its frames"
        )
        assert 0.4 * wire_bytes < two._receiver._sent[full.form] < 0.6 * wire_bytes, (
            "one shard of two"
        )


async def test_a_delta_from_another_version_changes_nothing(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        chain = [names["seed"], names["one"]]
        await spread(double, 0, *chain)
        await double.until_said(RefitDone)
        slot = await asyncio.to_thread(one._slots.current)
        _, other = await a_model(double, 9, folder="other")
        await spread_delta(double, other, *chain, base_path="versions/other")
        failed = await double.until_said(ApplyFailed)
        assert (failed.lacks_base, failed.reason) == (
            True,
            "the current slot is not the base of this delta",
        )
        assert await asyncio.to_thread(one._slots.current) == slot
        assert not (await asyncio.to_thread(one._slots.directories))[1].exists(), (
            "the spare slot was not begun"
        )
