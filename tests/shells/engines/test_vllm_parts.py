"""The pure parts of the vLLM engine: bodies, chunks, flags; and its client against a server that answers as told."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from echo2d.core.protocol.sampling import Sampling
from echo2d.core.worker.events import LabelSpan
from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.base import AdapterBase, GenerateRequest
from echo2d.engines.server.admission import ServerLoad
from echo2d.engines.server.calls import GenerationCall, SampleState
from echo2d.engines.server.continuation import ReportedToken, StreamChunk
from echo2d.engines.server.launch import AdapterNeeds
from echo2d.engines.stream import RequestStream, check_request
from echo2d.engines.vllm.client import VllmClient
from echo2d.engines.vllm.engine import VllmEngine, VllmLaunch
from echo2d.engines.vllm.generate import piece_seed, read_chunk, request_body
from echo2d.errors import EngineFault, OperatorFault


def a_sample(request: GenerateRequest) -> tuple[GenerationCall, SampleState]:
    limit = check_request(request, vocab_size=64, context_max=None)
    call = GenerationCall(request, RequestStream(1), [7], limit)
    return call, SampleState(call, 0)


def test_a_piece_goes_on_after_the_output_with_a_seed_of_its_own() -> None:
    request = GenerateRequest("r", [1, 2], 1, 10, Sampling(0.7), stop_token_ids=(5, 3))
    call, sample = a_sample(request)
    first = request_body("a", "salt", None, call, sample)
    sample.extend([ReportedToken(9, -0.5, "1-a")])
    second = request_body("b", "salt", "1-a", call, sample)
    assert (first["model"], second["model"]) == (None, "1-a")
    assert second["token_ids"] == [1, 2, 9]
    assert second["sampling_params"]["max_tokens"] == 9
    assert second["sampling_params"]["stop_token_ids"] == [3, 5]
    assert first["sampling_params"]["seed"] != second["sampling_params"]["seed"]
    assert 0 <= piece_seed(2**64, 2**40) < 2**63


def a_chunk(ids: list[int], *, end: int, **choice: Any) -> dict[str, Any]:
    content = [{"token_id": each, "logprob": -each / 8} for each in ids]
    made = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": None}
    return {"choices": [made | choice], "usage": {"completion_tokens": end}}


def test_a_chunk_has_its_tokens_and_the_last_one_the_versions() -> None:
    assert read_chunk(a_chunk([8, 16], end=3), {}) == StreamChunk([(8, -1.0), (16, -2.0)], 3)
    spans = [{"version": "1-a", "start": 0, "end": 3}]
    last = a_chunk([], end=3, finish_reason="abort", weight_versions=spans, logprobs=None)
    assert read_chunk(last, {}) == StreamChunk([], 3, "abort", None, [LabelSpan(0, 3, "1-a")])
    assert read_chunk(a_chunk([1, 2], end=2, logprobs={"content": []}), {}).tokens is None


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": []},
        {"error": {"message": "dead"}},
        a_chunk([1], end=1, finish_reason="?"),
    ],
)
def test_a_chunk_that_says_something_else_is_a_fault(chunk: dict[str, Any]) -> None:
    with pytest.raises(EngineFault):
        read_chunk(chunk, {})


def test_each_engine_gets_the_gpus_after_those_before_it(tmp_path: Path) -> None:
    base = VllmLaunch(Path("python"), ["--tensor-parallel-size", "2"], tmp_path, {})
    assert [each.environment for each in base.each(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert base.each(1)[0].environment == {}
    # The operator, or SLURM, has chosen the GPUs of this box.
    given = VllmLaunch(Path("python"), ["-tp=2"], tmp_path, {"CUDA_VISIBLE_DEVICES": "7,4,1,0"})
    assert [each.environment for each in given.each(2)] == [
        {"CUDA_VISIBLE_DEVICES": "7,4"},
        {"CUDA_VISIBLE_DEVICES": "1,0"},
    ]
    with pytest.raises(OperatorFault, match="expected 6 GPUs for 3 engines of 2; found '7,4,1,0'"):
        given.each(3)
    none = VllmLaunch(Path("python"), [], tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert none.each(2)[1].environment == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ("", 1),
        ("--tensor-parallel-size=2", 2),
        ("--tensor_parallel_size 2 -pp 3", 6),
        ("--tp 4 --dp-size 2", 8),
        ("--tp 4 --dp-size 2 --enable-dp-attention", 4),
        ("--tp 2 --tp=8", 8),  # the last one counts
    ],
)
def test_the_parallel_sizes_say_how_many_gpus_a_server_uses(flags: str, gpus: int) -> None:
    assert VllmLaunch(Path("python"), flags.split(), Path(), {}).gpus == gpus


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_at_which_vllm_does_not_draw_is_refused(temperature: float) -> None:
    refusal = VllmEngine.kind.refusal
    asked = GenerateRequest("r", [1], 1, 4, Sampling(temperature))
    assert f"0.01 to 2 only; asked was {temperature:g}" in refusal(None, asked)
    assert not refusal(None, replace(asked, sampling=Sampling(0.0)))


def test_a_server_listens_where_only_this_user_can_enter(tmp_path: Path) -> None:
    launch = VllmLaunch(Path("python"), [], tmp_path, {})
    url = launch.url(tmp_path)
    command = launch.command(tmp_path, "1-a", url=url, keys=tmp_path)
    assert command[command.index("--uds") + 1] == f"{tmp_path}/socket"
    assert "secret" not in str(command)
    assert launch.settings("secret")["VLLM_API_KEY"] == "secret"
    assert "--uds is set by echo2d" in VllmLaunch.refusal(["--uds=x"])


def test_the_flags_of_adapters_have_a_rank_that_vllm_knows(tmp_path: Path) -> None:
    launch = VllmLaunch(Path("python"), [], tmp_path, {})
    flags = launch.adapter_flags(AdapterNeeds().grown(AdapterLayout(24, 1.0, {}), 5))
    assert flags == (
        *("--enable-lora", "--max-lora-rank", "32", "--max-loras", "5"),
        *("--max-cpu-loras", "5"),
    )


def test_an_adapter_that_needs_no_more_than_those_before_it_needs_no_other_flags() -> None:
    wide = AdapterLayout(32, 1.0, {"model.layers.0.q_proj": ("a", "b")})
    narrow = AdapterLayout(8, 4.0, {"model.layers.0.q_proj": ("a", "b")})
    other = AdapterLayout(8, 4.0, {"model.layers.0.o_proj": ("a", "b")})
    needs = AdapterNeeds().grown(wide, 5)
    assert needs.grown(narrow, 2) == needs
    assert needs.grown(other, 5) == AdapterNeeds(32, ["o_proj", "q_proj"], 5)


@pytest.mark.parametrize(
    ("label", "newest", "outdated"),
    [
        ("3-a", "3-a", False),
        ("2-a", "3-a", False),
        ("1-a", "3-a", False),
        ("0-a", "3-a", True),
        ("3-b", "3-a", True),  # revoked
        ("4-a", "3-a", True),  # the run went back
    ],
)
def test_a_request_goes_on_while_a_train_step_takes_its_next_token(
    label: str, newest: str, *, outdated: bool
) -> None:
    base = AdapterBase(Path(), "", {}, staleness_max=2, held_max=3)
    assert base.outdated(label, newest) is outdated
    assert base.adapters_max == 6, "3 that are held, 2 of older requests, and the next one"


@asynccontextmanager
async def answered(answers: dict[str, Any]) -> AsyncIterator[VllmClient]:
    """A client whose server gives these answers, by path."""

    async def answer(request: web.Request) -> web.Response:
        found = answers[request.path]
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    client = VllmClient(f"http://{host}:{port}")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


async def test_the_load_of_replicas_is_that_of_all_and_of_the_fullest_cache() -> None:
    lines: dict[str, tuple[float, float]] = {
        "num_requests_running": (40, 30),
        "num_requests_waiting": (1, 0),
        "kv_cache_usage_perc": (0.47, 0.25),
    }
    text = "".join(
        f'vllm:{name}{{engine="{at}"}} {value}\n'
        for name, values in lines.items()
        for at, value in enumerate(values)
    )
    async with answered({"/metrics": text}) as client:
        client._running_max = 64
        assert await client.load() == ServerLoad(70, 1, 0.47, 128)


async def test_a_server_that_is_too_old_or_has_no_routes_is_refused() -> None:
    answers: dict[str, Any] = {"/version": {"version": "0.31.0"}, "/openapi.json": {"paths": {}}}
    async with answered(answers) as client:
        with pytest.raises(EngineFault, match=r"vLLM 0\.31\.0 does not report .* use 0\.32\.0"):
            await client.probe()
        answers["/version"] = {"version": "0.32.0+cpu"}
        with pytest.raises(EngineFault, match="does not serve /pause: start it with VLLM_SERVER"):
            await client.probe()
        paths = ("/pause", "/resume", "/collective_rpc", "/weight_info", "/update_weight_version")
        answers |= {"/openapi.json": {"paths": dict.fromkeys(paths)}, "/v1/models": {}}
        for found in ({}, {"results": [{"new_runner": True}]}):
            answers["/collective_rpc"] = found
            with pytest.raises(
                EngineFault, match="lack our extension, or have a model runner that"
            ):
                await client.probe()
        whole: dict[str, Any] = {"logprobs": "processed_logprobs"}
        for state, words in (
            ({"logprobs": "raw_logprobs"}, "raw_logprobs, which do not know the temperature"),
            ({**whole, "drafts": True}, "without --speculative-config"),
        ):
            answers["/collective_rpc"] = {"results": [state]}
            with pytest.raises(EngineFault, match=words):
                await client.probe()
