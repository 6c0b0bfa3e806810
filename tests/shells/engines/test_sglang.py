"""The pitfalls of SGLang's HTTP API, none of which reaches a token."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.core.protocol.sampling import Sampling
from echo2d.engines.base import GenerateRequest
from echo2d.engines.server import sampling_loop, weight_update
from echo2d.engines.server.launch import Running
from echo2d.engines.server.memory import ServerMemory
from echo2d.engines.server.sampling_loop import PIECES_FRUITLESS_MAX
from echo2d.engines.server.weight_update import Doubtful, RefitMode
from echo2d.engines.sglang.engine import SglangEngine
from echo2d.errors import EngineFault
from tests.support.engine_contract import ENDLESS, PROMPT, SHORT, check_logprobs, generated, running
from tests.support.engine_harness import label
from tests.support.sglang_double import SglangDouble, Trap
from tests.support.sglang_harness import DoubleHarness


class Pair:
    """A double, and an engine that serves version 0 of it."""

    def __init__(self, folder: Path, double: SglangDouble, mode: RefitMode) -> None:
        self.double = double
        self.harness = DoubleHarness(folder, [double], refit_mode=mode)
        self.engine = self.harness.engine()

    async def refit(self, version: int) -> None:
        await self.engine.refit(self.harness.snapshot(version), label(version))


@asynccontextmanager
async def a_pair(
    folder: Path, mode: RefitMode = "retract", **options: object
) -> AsyncIterator[Pair]:
    async with SglangDouble.serving(**options) as double:
        pair = Pair(folder, double, mode)
        await pair.engine.start()
        await pair.refit(0)
        double.calls.clear()
        double.asked.clear()
        yield pair
        await pair.engine.check()
        await pair.engine.close()


async def test_a_refit_keeps_its_order(tmp_path: Path) -> None:
    """Pause first: without it an update waits for every request to end. Health is never asked: it would be doubted."""
    async with a_pair(tmp_path) as pair, running(pair.engine, ENDLESS):
        pair.double.calls.clear()
        await pair.refit(1)
        calls = [call for call in pair.double.calls if call != "abort"]
        assert calls == ["pause retract", "abort_all", "update", "model_info", "continue"]
        assert "health" not in pair.double.calls
        assert pair.double.updates[-1]["load_format"] == "auto"
        assert pair.double.updates[-1]["abort_all_requests"] is False


async def test_an_older_server_is_not_asked_to_flush_within_an_update(tmp_path: Path) -> None:
    """Before 0.5.22 a flush that fails there ends the server."""
    async with (
        a_pair(tmp_path, version="0.5.21") as pair,
        running(pair.engine, ENDLESS) as (output,),
    ):
        await output.enough_of(0)
        pair.double.calls.clear()
        await pair.refit(1)
        assert [call for call in pair.double.calls if call != "abort"] == [
            "pause retract", "abort_all", "update", "flush", "model_info", "continue",
        ]  # fmt: skip
        assert pair.double.updates[-1]["flush_cache"] is False
        await output.enough_of(1)
    check_logprobs(pair.harness, output)


async def test_a_server_that_started_with_dummy_weights_loads_the_real_ones(tmp_path: Path) -> None:
    """Without a load format it would use the one that it was started with."""
    async with a_pair(tmp_path, dummy=True) as pair:
        await pair.refit(1)
        check_logprobs(pair.harness, await generated(pair.engine, SHORT))


@pytest.mark.parametrize("equal", [True, False])
async def test_tokens_of_a_version_in_memory_are_given_out_once_it_was_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, equal: bool
) -> None:
    """If the memory has other words, none of them leaves the engine."""
    async with a_pair(tmp_path) as pair, running(pair.engine, ENDLESS) as (output,):
        written, double = asyncio.Event(), pair.double

        async def staged(*_: object) -> bool:
            return True

        async def apply(*_: object) -> bool:
            double.weights = double.label = double.shown = label(1)
            return True

        async def check(*_: object) -> None:
            # Requests go on meanwhile, and write tokens.
            while not any(len(each.output) > 20 for each in double.live.values()):  # noqa: ASYNC110 - the double sends no event
                await asyncio.sleep(0)
            assert label(1) not in {name for each in output.samples for name in each.labels}
            written.set()
            if not equal:
                raise Doubtful("the memory has other words")

        for name, step in (("prepare", staged), ("apply", apply), ("check", check)):
            monkeypatch.setattr(ServerMemory, name, step)
        if equal:
            await pair.refit(1)
            await output.enough_of(1)
        else:
            with pytest.raises(EngineFault, match="other words"):
                await pair.refit(1)
            assert pair.engine.label is None
            await output.until(lambda sample: sample.finish == "abort")
            assert {name for each in output.samples for name in each.labels} == {label(0)}
        assert written.is_set()


async def test_quantized_weights_are_loaded_again_in_their_format_or_not_at_all(
    tmp_path: Path,
) -> None:
    quantized = {"quantization": "fp8", "load_format": "flash_rl"}
    for info, said, why in (
        (quantized, "fp8", ""),
        (quantized, "", "quantizes to fp8 and worker.engine_args says nothing"),
        ({"load_format": "flash_rl"}, "fp8", ""),
        ({"load_format": "flash_rl"}, "", "quantizes to fp8 and worker.engine_args says nothing"),
        ({}, "fp8", "quantizes to nothing and worker.engine_args says fp8"),
        ({"quantization": "fp8"}, "fp8", "only with --load-format flash_rl"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "", "quantizes to kv_fp8_e5m2 and"),
        ({"kv_cache_dtype": "bfloat16"}, "", ""),
    ):
        async with SglangDouble.serving(info=info) as double:
            harness = DoubleHarness(tmp_path, [double])
            engine = SglangEngine(Running(double.url, tmp_path), quantized_as=said)
            await engine.start()
            if why:
                with pytest.raises(EngineFault, match=why):
                    await engine.refit(harness.snapshot(0), label(0))
                assert not double.updates
            else:
                await engine.refit(harness.snapshot(0), label(0))
                assert double.updates[-1]["load_format"] == info.get("load_format", "auto")
            await engine.close()


async def test_a_server_of_ones_own_that_was_started_again_is_asked_anew(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair:
        pair.double.info = {"quantization": "fp8", "load_format": "flash_rl"}
        async with running(pair.engine, ENDLESS) as (output,):
            pair.double.cuts, pair.double.shown = 1, "another program's"
            await output.until(lambda sample: sample.finish == "abort")
        with pytest.raises(
            EngineFault, match=r"quantizes to fp8 and worker.engine_args says nothing"
        ):
            await pair.refit(1)
        assert not pair.double.updates[1:]
        pair.double.info = {}
        await pair.refit(1)
        check_logprobs(pair.harness, await generated(pair.engine, SHORT))


async def test_a_request_that_may_outgrow_the_servers_context_is_refused_at_once(
    tmp_path: Path,
) -> None:
    async with a_pair(tmp_path, info={"context_length": 64}) as pair:
        pair.double.calls.clear()
        with pytest.raises(EngineFault, match="has room for 64: give it more"):
            await generated(pair.engine, replace(SHORT, max_new_tokens=64))
        assert not pair.double.calls
        fits = replace(SHORT, prompt=SHORT.prompt[:4], max_new_tokens=52)
        check_logprobs(pair.harness, await generated(pair.engine, fits))


async def test_an_update_that_was_answered_with_400_but_made_counts(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair, running(pair.engine, ENDLESS) as (output,):
        await output.enough_of(0)
        pair.double.traps.append("updated_anyway")
        pair.double.calls.clear()
        await pair.refit(1)
        assert pair.engine.label == label(1)
        calls = [call for call in pair.double.calls if call != "abort"]
        assert calls == [
            "pause retract",
            "abort_all",
            "update",
            "flush",
            "relabel",
            "model_info",
            "continue",
        ]
        await output.enough_of(1)
    check_logprobs(pair.harness, output)


DOUBTS: list[Trap] = [
    "refuse",
    "rolled_back",
    "old_label",
    "die",
    "drop_answer",
    "files_change",
    "hang",
]


@pytest.mark.parametrize("trap", DOUBTS)
async def test_an_engine_in_doubt_about_its_weights_serves_nothing(
    tmp_path: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback that is none, a lost answer, a death, another label, other files, no answer at all."""
    async with a_pair(tmp_path) as pair:
        port = int(pair.double.url.rpartition(":")[2])
        async with running(pair.engine, ENDLESS) as (output,):
            pair.double.traps.append(trap)
            if trap == "hang":
                monkeypatch.setattr(weight_update, "LOAD_S_MIN", 0.05)
            with pytest.raises(EngineFault):
                await pair.refit(1)
            monkeypatch.undo()
            assert pair.engine.label is None
            await output.until(lambda sample: sample.finish == "abort")
        check_logprobs(pair.harness, output)
        with pytest.raises(EngineFault):
            await generated(pair.engine, SHORT)
        if trap == "die":
            await pair.double.open(port)
        await pair.refit(2)
        check_logprobs(pair.harness, await generated(pair.engine, SHORT))


async def test_a_server_that_refuses_to_pause_goes_on(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair, running(pair.engine, ENDLESS) as (output,):
        pair.double.traps.append("no_pause")
        with pytest.raises(EngineFault, match="still served"):
            await pair.refit(1)
        assert pair.engine.label == label(0)
        seen = max(len(sample.tokens) for sample in output.samples)
        await output.until(lambda sample: len(sample.tokens) > seen + 20)
    check_logprobs(pair.harness, output)


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_a_sample_continues_through_refits(tmp_path: Path, mode: RefitMode) -> None:
    async with a_pair(tmp_path, mode) as pair:
        request = replace(ENDLESS, max_new_tokens=600, samples=3)
        async with running(pair.engine, request) as (output,):
            await output.enough_of(0)
            for version in (1, 2):
                await pair.refit(version)
                await output.enough_of(version)
            await output.until(lambda sample: sample.finish is not None)
        assert output.finishes() == ["length"] * 3
        assert [len(sample.tokens) for sample in output.samples] == [600] * 3
        check_logprobs(pair.harness, output)


@pytest.mark.parametrize("held", [False, True])
async def test_the_cost_of_computing_caches_again_is_known_from_the_second_refit_on(
    tmp_path: Path, held: bool
) -> None:
    """Also if the engine was stopped before the version came."""
    async with a_pair(tmp_path) as pair, running(pair.engine, ENDLESS) as (output,):
        reports = []
        for version in (1, 2):
            if held:
                await pair.engine.hold()
            snapshot = pair.harness.snapshot(version)
            reports.append(await pair.engine.refit(snapshot, label(version)))
            await pair.engine.release()
            await output.until(lambda sample, version=version: label(version) in sample.labels)  # type: ignore[misc]
        old = [sample.labels.count(label(0)) for sample in output.samples]
        assert reports[0].recomputed_tokens == sum(old) + 2 * len(PROMPT)
        assert reports[0].recompute_s is None
        assert reports[1].recomputed_tokens > reports[0].recomputed_tokens
        assert reports[1].recompute_s is not None
        assert 0 < reports[1].recompute_s < 10


async def test_a_refit_in_place_computes_nothing_again_until_a_sample_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that lived through a refit is cut later: then its tokens have their versions, and a
    worker that dies takes no more of them with it. What that drops counts at the next refit.
    """
    async with a_pair(tmp_path, "in_place") as pair:
        request = replace(ENDLESS, max_new_tokens=4000, samples=1)
        async with running(pair.engine, request) as (output,):
            (sample,) = output.samples
            [live] = pair.double.live.values()
            report = await pair.engine.refit(pair.harness.snapshot(1), label(1))
            assert (report.recomputed_tokens, report.recompute_s) == (0, 0.0)
            while len(live.output) < len(sample.tokens) + 100:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
            assert label(1) not in sample.labels, "the server has not said yet who wrote them"
            monkeypatch.setattr(sampling_loop, "HELD_S_MAX", 0.0)
            await output.until(lambda sample: label(1) in sample.labels)
            monkeypatch.undo()
            report = await pair.engine.refit(pair.harness.snapshot(2), label(2))
            assert report.recomputed_tokens > len(PROMPT) + 100
            assert output.finishes() == [None]


async def test_a_refit_in_place_names_the_version_of_a_token_at_the_end(tmp_path: Path) -> None:
    """The KV stays that of the old weights: no version gives these logprobs, but each token has its writer."""
    async with a_pair(tmp_path, "in_place") as pair:
        request = replace(ENDLESS, max_new_tokens=400, samples=1)
        async with running(pair.engine, request) as (output,):
            await pair.refit(1)
            assert pair.double.updates[-1]["flush_cache"] is False
            await output.until(lambda sample: sample.finish is not None)
        (sample,) = output.samples
        assert len(sample.tokens) == 400
        assert list(dict.fromkeys(sample.labels)) == [label(0), label(1)]


async def test_refits_there_and_back_between_two_chunks_are_noticed(tmp_path: Path) -> None:
    """The version served is the one under which the request began, and yet it did not write all tokens."""
    async with a_pair(tmp_path, "in_place") as pair:
        request = replace(ENDLESS, max_new_tokens=400, samples=1)
        async with running(pair.engine, request) as (output,):
            [live] = pair.double.live.values()
            pair.double.silent_until = len(live.output)
            await pair.refit(1)
            pair.double.silent_until += 20
            while len(live.output) < pair.double.silent_until:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
            await pair.refit(0)
            pair.double.silent_until = None
            await output.until(lambda sample: sample.finish is not None)
        (sample,) = output.samples
        assert (sample.finish, len(sample.tokens)) == ("length", 400)
        labels = [
            name
            for name, before in zip(sample.labels, [None, *sample.labels], strict=False)
            if name != before
        ]
        assert labels == [label(0), label(1), label(0)]
        assert pair.engine.label == label(0)


async def test_tokens_written_after_another_clients_update_are_dropped(tmp_path: Path) -> None:
    """Its own word at the end of a request gives it away; what it wrote meanwhile is nobody's."""
    async with a_pair(tmp_path) as pair:
        with suppress(AssertionError):
            async with running(pair.engine, replace(ENDLESS, samples=1)):
                for live in pair.double.live.values():
                    live.events.append(("somebody", 1))
        assert pair.engine.label is None


async def test_cached_prefixes_of_other_weights_are_never_used(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair:
        for version in (1, 2, 1):
            await pair.refit(version)
            check_logprobs(pair.harness, await generated(pair.engine, SHORT))
        assert {salt for salt, _ in pair.double.cache} == {f"4 {label(1)}"}, "it was served before"


async def test_samples_share_a_prefix(tmp_path: Path) -> None:
    """The first goes ahead; the others find its KV."""
    async with a_pair(tmp_path) as pair, running(pair.engine, replace(ENDLESS, samples=5)):
        cached = sorted(live.cached for live in pair.double.live.values())
        assert cached == [0, *[len(PROMPT) - 1] * 4]


async def test_ids_are_no_prefixes_of_each_other(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair, running(pair.engine, replace(ENDLESS, samples=12)):
        rids = list(pair.double.live)
        assert len({len(rid) for rid in rids}) == 1
        assert len(set(rids)) == 12


async def test_a_dead_server_is_noticed_by_the_next_request(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair:
        await pair.double.die()
        output = await generated(pair.engine, SHORT)
        assert output.finishes() == ["abort"] * SHORT.samples
        assert pair.engine.label is None


async def test_a_sample_whose_stream_breaks_off_goes_on(tmp_path: Path) -> None:
    """SGLang 0.5.23 breaks a stream off now and then, by an error where an abort meets other output.

    The server serves the same version as before, so the sample continues from the tokens it has.
    """
    async with a_pair(tmp_path) as pair:
        pair.double.cuts = 5
        request = replace(ENDLESS, max_new_tokens=300, samples=3)
        output = await generated(pair.engine, request)
        assert pair.double.cuts == 0
        assert pair.engine.label == label(0)
        assert output.finishes() == ["length"] * 3
        assert [len(sample.tokens) for sample in output.samples] == [300] * 3
    check_logprobs(pair.harness, output)


async def test_a_sample_ends_if_its_stream_breaks_off_again_and_again(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair:
        pair.double.cuts, pair.double.cut_after = 1000, 0
        output = await generated(pair.engine, replace(ENDLESS, samples=1))
        assert output.finishes() == ["abort"]
        assert pair.double.cuts == 1000 - (PIECES_FRUITLESS_MAX + 1)


async def test_a_full_server_gets_fewer_requests(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair:
        pair.double.token_usage, pair.double.waiting_extra = 0.97, 3
        pair.engine._writing._looked_at = float("-inf")
        async with running(pair.engine, ENDLESS):
            assert pair.engine._room.limit < 64
            pair.double.token_usage, pair.double.waiting_extra = 0.2, 0
            before = pair.engine._room.limit
            pair.engine._writing._looked_at = float("-inf")
            await generated(pair.engine, SHORT)
            assert pair.engine._room.limit > before


@pytest.mark.parametrize("version", ["0.5.18", "0.4.10", "", "nonsense"])
async def test_a_server_that_is_too_old_is_refused(tmp_path: Path, version: str) -> None:
    async with SglangDouble.serving(version=version) as double:
        harness = DoubleHarness(tmp_path, [double])
        engine = harness.engine()
        await engine.start()
        with pytest.raises(EngineFault, match=r"0\.5\.19"):
            await engine.refit(harness.snapshot(0), label(0))
        await engine.close()


async def test_keys_of_servers_are_not_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with SglangDouble.serving() as double:
            engine = SglangEngine(
                Running(double.url, tmp_path, "key-of-the-api", "key-of-the-admin")
            )
            await engine.start()
            harness = DoubleHarness(tmp_path, [double])
            await engine.refit(harness.snapshot(0), label(0))
            double.traps.append("refuse")
            with pytest.raises(EngineFault) as raised:
                await engine.refit(harness.snapshot(1), label(1))
            await engine.close()
    for text in (caplog.text, str(raised.value)):
        assert "key-of" not in text
        assert "secret" not in text


async def test_a_request_during_a_refit_waits_for_the_new_version(tmp_path: Path) -> None:
    async with a_pair(tmp_path) as pair, asyncio.TaskGroup() as tasks:
        refit = tasks.create_task(pair.refit(1))
        await pair.double.asked.wait()
        late = tasks.create_task(generated(pair.engine, GenerateRequest("late", PROMPT, 2, 9)))
        await refit
        output = await late
    check_logprobs(pair.harness, output)


async def test_an_abort_ends_samples_that_wait_for_a_place(tmp_path: Path) -> None:
    async with SglangDouble.serving() as double:
        harness = DoubleHarness(tmp_path, [double])
        engine = harness.engine(slots=2)
        await engine.start()
        await engine.refit(harness.snapshot(0), label(0))
        async with running(engine, ENDLESS), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(generated(engine, replace(SHORT, request_id="waits")))
            while (await engine.load()).waiting == 0:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
            await engine.abort("waits")
            assert (await waiting).finishes() == ["abort"] * SHORT.samples
        await engine.close()


async def test_min_p_is_refused_where_it_would_end_the_server(tmp_path: Path) -> None:
    """SGLang 0.5.23 asserts that no seeded request has it: one lease would cost the whole server."""
    request = replace(SHORT, sampling=Sampling(min_p=0.1))
    async with a_pair(tmp_path, deterministic=True) as pair:
        with pytest.raises(EngineFault, match="cannot draw with min_p"):
            await generated(pair.engine, request)
        await generated(pair.engine, SHORT)
    async with a_pair(tmp_path) as pair:
        await generated(pair.engine, request)
