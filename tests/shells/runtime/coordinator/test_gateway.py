"""The gateway from its users' side: the official client, unmodified, with a coordinator, seed and workers."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from echo2d.core.base.ids import Digest, Version, version_label
from echo2d.engines.fake import fake_token
from echo2d.net.gateway import handlers as gateway_handlers
from echo2d.runtime.coordinator import access_watch
from echo2d.runtime.coordinator import gateway as runtime_gateway
from echo2d.runtime.run_dir.tokens import revoke_token
from echo2d.tasks.sort_digits import VOCABULARY
from tests.support.gateway_site import Site, a_site
from tests.support.polling import HANG_S

ASK = [{"role": "user", "content": "3141"}]
ASK_TOKENS = [6, 4, 7, 4, 14]
PACE = 2000.0  # tokens a second of an engine whose caller is to see them come
# Tokens a second of an engine that must not finish before something happens to it: the run takes most of them, so that
# an answer of 40 tokens takes 20 s.
SLOW = 20.0


def plain(site: Site, prompt: list[int], length: int) -> tuple[int, str]:
    """A seed under which the next tokens are all digits or signs, and their text: what any one engine would write."""
    newest = site.coordinator.status()["newest_version"]
    label = version_label(Version(0), Digest(bytes.fromhex(newest["digest"])))
    for seed in range(10_000):
        context = list(prompt)
        while len(context) < len(prompt) + length and min(context[len(prompt) :], default=2) > 1:
            context.append(fake_token(label, context, sample=0, rng_seed=seed, vocab_size=17)[0])
        output = context[len(prompt) :]
        if len(output) == length and min(output) > 1:
            return seed, "".join(VOCABULARY[token] for token in output)
    raise AssertionError("no seed will do")


@pytest.fixture(autouse=True)
def fast_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_watch, "ACCESS_RELOAD_S", 0.05)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with a_site(tmp_path) as made:
        yield made


def spans_of(choice: Any) -> list[tuple[int, int, int]]:
    return [(span["start"], span["end"], span["version"]) for span in choice.version_spans]


async def test_the_official_client_works_unmodified(site: Site) -> None:
    await site.worker("box")
    client = await site.client()
    [model] = (await client.models.list()).data
    assert model.id == "policy"
    await site.serve(1)

    seed, text = plain(site, ASK_TOKENS, 12)
    ask: Any = {"model": "policy", "messages": ASK, "seed": seed, "max_tokens": 12}
    said = await client.chat.completions.create(**ask, logprobs=True)
    [choice] = said.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        text,
        "length",
    )
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (5, 12)
    assert spans_of(choice) == [(0, 12, 0)]
    assert [each.token for each in choice.logprobs.content] == list(text)

    stop = text[3:5]
    cut = await client.chat.completions.create(**ask, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == (
        "stop",
        text.index(stop) + 2,
    )

    several = await client.completions.create(
        model="policy", prompt="3141>", n=3, max_tokens=4, seed=seed, logprobs=0
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].text == text[:4]
    assert several.choices[0].logprobs is not None
    assert several.choices[0].logprobs.tokens == list(text[:4])
    assert several.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert len({choice.text for choice in several.choices}) > 1
    await site.calls_ended()
    assert site.facts["ended"] == {"done": 3}


async def test_a_stream_has_the_same_text_as_a_whole_answer(site: Site) -> None:
    await site.worker("box", tokens_per_s=PACE)
    client = await site.client()
    await site.serve(1)
    whole = await client.completions.create(model="policy", prompt="27>", max_tokens=50, seed=3)
    options: Any = {"include_usage": True}
    stream = await client.completions.create(
        model="policy", prompt="27>", max_tokens=50, seed=3, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in told) == whole.choices[0].text
    assert [choice.finish_reason for choice in told][-1] == whole.choices[0].finish_reason
    assert spans_of(told[-1]) == spans_of(whole.choices[0])
    assert chunks[-1].usage == whole.usage

    ask: Any = {"model": "policy", "messages": ASK, "n": 2, "seed": 3, "stream": True}
    chat = await client.chat.completions.create(**ask)
    deltas = [chunk.choices[0] async for chunk in chat]
    for index in range(2):
        mine = [choice for choice in deltas if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == "stop"
        assert "".join(choice.delta.content or "" for choice in mine)


async def test_the_training_client_of_verifiers_gets_the_fields_that_it_reads(site: Site) -> None:
    """As `renderers.client.generate` posts it, and by the rules by which that judges the answer."""
    await site.worker("box")
    await site.serve(1)
    client = await site.client()
    body = {
        "model": "policy",
        "token_ids": [6, 4, 14],
        "sampling_params": {"temperature": 1.0, "max_tokens": 40, "stop_token_ids": [1], "logprobs": 1,
                            "skip_special_tokens": False, "routed_experts_prompt_start": 2},
        "cache_salt": "0",
    }  # fmt: skip
    url = f"{site.url}/inference/v1/generate"
    answer = await client.post(
        url, cast_to=dict[str, Any], body=body, options={"headers": {"X-Session-ID": "trace"}}
    )
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    assert all(-9999.0 < entry["logprob"] <= 0 for entry in content)
    assert (
        choice["version_spans"][0]["end"]
        == len(choice["token_ids"])
        == answer["usage"]["completion_tokens"]
    )
    assert (answer["request_id"][:4], answer["prompt_token_ids"]) == ("gen-", None)
    assert choice["finish_reason"] in ("stop", "length")


async def test_tools_and_their_results_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }}{% endfor %}"
        "{{ m.content }}{% endfor %}>"
    )
    async with a_site(tmp_path, template) as site:
        await site.worker("box")
        client = await site.client()
        await site.serve(1)
        tools: Any = [{"type": "function", "function": {"name": "12", "parameters": {}}}]
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "12", "arguments": '{"at": 345}'},
        }
        messages: Any = [
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "67"},
        ]
        ask: Any = {"model": "policy", "messages": messages, "max_tokens": 4, "seed": 1}
        said = await client.chat.completions.create(**ask, tools=tools)
        assert said.usage.prompt_tokens == len("12" + "3141" + "345" + "67" + ">")
        assert said.choices[0].message.tool_calls is None
        stream = await client.chat.completions.create(**ask, tools=tools, stream=True)
        told = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(told) == said.choices[0].message.content
        none = await client.chat.completions.create(**ask, tools=tools, tool_choice="none")
        assert none.usage.prompt_tokens == said.usage.prompt_tokens - 2
        with pytest.raises(openai.BadRequestError, match="no engine can force"):
            await client.chat.completions.create(**ask, tools=tools, tool_choice="required")
        forms: Any = (
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x"}},
        )
        for form in forms:
            with pytest.raises(openai.BadRequestError, match="no longer those of the policy"):
                await client.chat.completions.create(**ask, response_format=form)


async def test_an_answer_names_its_versions_and_may_ask_for_one(site: Site) -> None:
    await site.worker("box")
    client = await site.client()
    await site.serve(1)
    ask: Any = {"model": "policy", "prompt": "1>", "max_tokens": 4}
    exact = {"X-Echo2d-Version-Exact": "0"}
    raw = await client.completions.with_raw_response.create(**ask, extra_headers=exact)
    facts = {name.lower(): value for name, value in raw.headers.items()}
    assert (facts["x-echo2d-version-first"], facts["x-echo2d-version"]) == ("0", "0")
    choice: Any = raw.parse().choices[0]
    assert (choice.version_first, choice.version_last) == (0, 0)
    with pytest.raises(openai.ConflictError) as refused:
        await client.completions.create(**ask, extra_headers={"X-Echo2d-Version-Exact": "3"})
    headers, body = refused.value.response.headers, refused.value.body
    assert isinstance(body, dict)
    assert (body["code"], body["current_version"]) == ("version", 0)
    assert (headers["Retry-After"], headers["X-Echo2d-Version"]) == ("1", "0")
    assert "X-Should-Retry" not in headers
    with pytest.raises(openai.BadRequestError, match="not together with"):
        await client.completions.create(**ask, extra_headers={**exact, "X-Echo2d-Min-Version": "0"})
    with pytest.raises(openai.BadRequestError, match="X-Echo2d-Version-Exact: expected"):
        await client.completions.create(**ask, extra_headers={"X-Echo2d-Version-Exact": "new"})


async def test_a_refusal_has_the_form_of_openais_errors(site: Site) -> None:
    client = await site.client()
    ask: Any = {"model": "policy", "prompt": "1>", "max_tokens": 2}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"top_k": -2}, "top_k: expected an integer"),
        ({"temperature": -1}, "temperature: expected a number"),
        ({"nonsense": 1}, "nonsense: unknown field"),
        ({"prompt": [1, 99]}, "token ids are below 17"),
        ({"prompt": ["1>", "2>"]}, "one prompt per call"),
        ({"n": 33}, "n: expected an integer from 1 to 32"),
        ({"max_tokens": 4097}, "at most 4096"),
        ({"logprobs": 2}, "sampled token"),
        ({"stop": [""]}, "stop: expected texts"),
    ]
    for change, words in changes:
        known = {
            key: value
            for key, value in {**ask, **change}.items()
            if key not in ("top_k", "nonsense")
        }
        extra = {key: value for key, value in change.items() if key not in known}
        with pytest.raises(openai.BadRequestError, match=words):
            await client.completions.create(**known, extra_body=extra)
    with pytest.raises(openai.NotFoundError, match="there is only 'policy'"):
        await client.completions.create(**{**ask, "model": "gpt"})
    with pytest.raises(openai.ConflictError, match="version 0 is the newest") as refused:
        await client.completions.create(**ask, extra_headers={"X-Echo2d-Min-Version": "3"})
    assert refused.value.body == {
        "message": "version 0 is the newest one", "type": "conflict_error", "param": None, "code": "version",
        "current_version": None,
    }  # fmt: skip
    with pytest.raises(openai.AuthenticationError, match="unknown credential"):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError, match="needs gateway"):
        await client.with_options(api_key=await site.secret("eye", "viewer")).models.list()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as http:
        for body, headers, status, code in [
            (b"{", {}, 400, "malformed"),
            (b"[]", {}, 400, "malformed"),
            (b"x", {"Content-Encoding": "gzip"}, 415, "encoded"),
            (io.BytesIO(bytes(1 << 21)), {}, 413, "too_large"),
        ]:
            async with http.post(
                f"{site.url}/v1/completions", data=body, headers=headers
            ) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_a_worker_that_leaves_hands_its_callers_over(site: Site) -> None:
    long: Any = {"answer_tokens": (60, 60)}
    first = await site.worker("one", tokens_per_s=SLOW, **long)
    client = await site.client()
    await site.serve(1)
    seed, text = plain(site, ASK_TOKENS, 40)
    ask: Any = {"model": "policy", "prompt": ASK_TOKENS, "max_tokens": 40, "seed": seed}
    chunks = aiter(await client.completions.create(**ask, stream=True))
    told = [(await anext(chunks)).choices[0]]
    # However long the second worker takes to come, the first one has not finished.
    await site.engines["one"].hold()
    await site.worker("two", **long)
    await site.serve(2)
    first.stop("the test says so")
    told += [chunk.choices[0] async for chunk in chunks]
    assert "".join(choice.text for choice in told) == text
    assert (told[-1].finish_reason, spans_of(told[-1])) == ("length", [(0, 40, 0)])
    assert site.facts["handed_over"] == 1


async def test_a_caller_that_hangs_up_or_is_revoked_holds_no_slot(site: Site) -> None:
    await site.worker("box", tokens_per_s=SLOW, answer_tokens=(60, 60))
    client = await site.client()
    await site.serve(1)
    seed, _ = plain(site, ASK_TOKENS, 40)
    ask: Any = {
        "model": "policy",
        "prompt": ASK_TOKENS,
        "max_tokens": 40,
        "seed": seed,
        "stream": True,
    }
    stream = await client.completions.create(**ask)
    await anext(aiter(stream))
    await stream.close()
    await site.calls_ended()
    assert site.facts["ended"] == {"gone": 1}
    stream = await client.completions.create(**ask)
    await asyncio.to_thread(revoke_token, site.directory / "run", "user")
    with pytest.raises(openai.APIError, match="revoked"):
        [chunk async for chunk in stream]
    await site.calls_ended()


async def test_the_call_of_a_caller_that_does_not_read_is_ended(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are free at once, and nothing more is kept for it."""

    async def stuck(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway_handlers, "_send", stuck)  # as when all buffers on the way are full
    monkeypatch.setattr(runtime_gateway, "UNREAD_BYTES_MAX", 600)
    await site.worker("box")
    await site.serve(1)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {await site.secret()}"}
    ) as http:
        body = {"model": "policy", "prompt": [6, 14], "max_tokens": 4, "n": 8, "stream": True}
        async with http.post(f"{site.url}/v1/completions", json=body) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await response.read()
    await site.calls_ended()
    assert sum(site.facts["ended"].values()) == 1
    assert site.facts["running"] == 0
    assert [record["outcome"] for record in await records_of(site)] == ["slow"]


async def test_messages_that_give_no_prompt_are_refused(site: Site) -> None:
    """400 in every case, never 500."""
    url, chat = (
        f"{site.url}/v1/chat/completions",
        b'{"model": "policy", "messages": [{"role": "user", "content": ',
    )
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {await site.secret()}"}
    ) as http:
        for rest in [
            b'"\\ud800"}]}',
            b'"x"}], "chat_template_kwargs": []}',
            b'"1"}], "temperature": 1' + b"0" * 400 + b"}",
            b'"1"}], "n": 32, "max_tokens": 4097}',
        ]:
            async with http.post(url, data=chat + rest) as response:
                told = await response.json()
                assert response.status == 400, told
                assert told["error"]["message"]


async def test_a_template_that_renders_nothing_is_refused(tmp_path: Path) -> None:
    async with a_site(tmp_path, "{{ messages[0].name }}") as site:
        client = await site.client()
        with pytest.raises(openai.BadRequestError, match="makes no tokens"):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "1"}]
            )


async def test_a_caller_that_waits_too_long_is_asked_to_try_again(tmp_path: Path) -> None:
    async with a_site(tmp_path, **{"gateway.wait_s": 0.1}) as site:
        client = await site.client()
        with pytest.raises(openai.ConflictError, match="no worker served 0, nothing"):
            await client.completions.create(model="policy", prompt="5>")


async def test_calls_of_the_gateway_are_recorded(site: Site) -> None:
    await site.worker("box")
    client = await site.client()
    await site.serve(1)
    said = await client.completions.create(model="policy", prompt="5>", max_tokens=3, user="me")
    [record] = await records_of(site)
    assert (record["id"], record["caller"], record["outcome"]) == (said.id, "user", "done")
    assert (record["prompt"], record["choices"][0]["text"]) == ([8, 14], said.choices[0].text)
    assert record["choices"][0]["version_spans"][0]["version"] == 0
    path = site.directory / "run" / "gateway.jsonl"
    assert (await asyncio.to_thread(path.stat)).st_mode & 0o777 == 0o600


async def records_of(site: Site) -> list[dict[str, Any]]:
    """Once there are any."""
    path = site.directory / "run" / "gateway.jsonl"
    async with asyncio.timeout(HANG_S):
        while not await asyncio.to_thread(lambda: path.exists() and path.stat().st_size):
            pass
    return [json.loads(line) for line in (await asyncio.to_thread(path.read_text)).splitlines()]


async def test_the_gateway_is_off_by_default(tmp_path: Path) -> None:
    async with a_site(tmp_path, **{"gateway.enabled": False}) as site:
        client = await site.client()
        with pytest.raises(openai.NotFoundError):
            await client.models.list()
