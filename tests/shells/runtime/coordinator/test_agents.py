"""Outside agents play episodes of the run: real coordinator, ledger, sockets and workers; the engines are fake."""

import asyncio
import base64
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from echo2d.client import Batch, Trajectory
from echo2d.net.security.tickets import make_ticket
from echo2d.tasks.sort_digits import EOS, VOCABULARY
from tests.support.gateway_site import Site, a_site
from tests.support.paths import REPO
from tests.support.polling import HANG_S
from tests.support.scripted_core import learner, make_snapshot
from tests.support.texts import CHATML, chat_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}<eos>"
    "{% else %}+{{ message.content }}>{% endif %}{% endfor %}"
)
OPENING = VOCABULARY.index("+")
PAGE = REPO / "docs/guide/environments.md"
LENGTH = 6  # most tokens of an answer
SILENT: dict[str, Any] = {"task.options": {"opening": [OPENING], "silence_s": 0.2}}
FEW_TURNS: dict[str, Any] = {"task.turns_max": 2, "task.episode_tokens": 60}


def ids(text: str) -> list[int]:
    return [VOCABULARY.index(sign) for sign in text]


class Agent:
    """A program outside: it has a secret of role agent, and speaks HTTP."""

    def __init__(self, site: Site, session: aiohttp.ClientSession, secret: str) -> None:
        self.site, self._session, self._secret = site, session, secret

    async def post(
        self, path: str, body: Mapping[str, Any], *, secret: str = "", ticket: str = ""
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        headers |= {"X-Echo2d-Episode": ticket} if ticket else {}
        data, url = io.BytesIO(json.dumps(body).encode()), self.site.url + path
        async with self._session.post(url, data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self.site.url + path) as reply:
            return reply.status, await reply.json()

    async def take(self, wait_s: float = HANG_S) -> dict[str, Any]:
        async with asyncio.timeout(HANG_S):
            while True:
                status, taken = await self.post(
                    "/v1/episodes", {"wait_s": wait_s}, secret=self._secret
                )
                if status == 200:
                    return dict(taken)
                assert (status, taken["error"]["code"]) == (503, "late"), taken

    async def call(self, ticket: str, tokens: Sequence[int], **params: Any) -> tuple[int, Any]:
        body = {
            "model": "policy",
            "token_ids": list(tokens),
            "sampling_params": {"logprobs": 0, **params},
        }
        return await self.post("/inference/v1/generate", body, secret=ticket)

    async def answer(self, ticket: str, tokens: Sequence[int]) -> list[int]:
        status, said = await self.call(ticket, tokens)
        assert status == 200, said
        [choice] = said["choices"]
        written: list[int] = choice["token_ids"]
        assert len(choice["logprobs"]["content"]) == len(written)
        assert [span["end"] for span in choice["version_spans"]][-1] == len(written)
        return written

    async def end(self, ticket: str, **said: Any) -> tuple[int, Any]:
        return await self.post(f"/v1/episodes/{ticket}/end", said)

    async def play(self, turns: int, reward: float = 1.0) -> dict[str, Any]:
        """One episode whose calls all go on from what was said before."""
        taken = await self.take()
        ticket, tokens = taken["ticket"], ids("+31>")
        for turn in range(turns):
            tokens = [*tokens, *await self.answer(ticket, tokens)]
            if turn + 1 < turns:
                tokens += ids(f"+{turn}>")
        status, told = await self.end(ticket, reward=reward)
        assert (status, told["turns"], told["branches"], told["differs"]) == (200, turns, 1, "")
        return {**taken, "tokens": tokens}


@asynccontextmanager
async def an_agent(directory: Path, name: str = "robot", **changes: Any) -> AsyncIterator[Agent]:
    changes = {
        "task.kind": "agents",
        "task.name": "outside",
        "task.options": {"opening": [OPENING], "stop_token_ids": [EOS]},
        "sampling.max_new_tokens": LENGTH,
        "policy.filter_zero_variance": False,
        **changes,
    }
    async with (
        a_site(directory, TEMPLATE, **changes) as site,
        aiohttp.ClientSession() as session,
    ):
        yield Agent(site, session, await site.secret(name, "agent"))


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    async with an_agent(tmp_path) as made:
        await made.site.worker("box")
        yield made


async def first_batch(agent: Agent) -> Batch:
    site = agent.site
    async with learner(site.directory / "run", site.opened) as trainer:
        await trainer.open_session(0)
        return await trainer.take_batch(1)


async def test_the_learner_gets_the_episodes_that_outside_agents_played(agent: Agent) -> None:
    played = await asyncio.gather(*(agent.play(3, reward=float(number)) for number in range(4)))
    assert {(each["group"], each["sample"]) for each in played} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    batch = await first_batch(agent)
    found: dict[tuple[int, int], Trajectory] = {}
    for group in batch.groups:
        assert group.prompt.tolist() == [OPENING], "the agents say how it goes on"
        found |= {(group.group_id, kept.sample): kept for kept in group.trajectories}
    for each in played:
        trajectory = found[each["group"], each["sample"]]
        assert [OPENING, *trajectory.tokens.tolist()] == each["tokens"]
        assert trajectory.turns == 3
        assert not trajectory.written[0]
        assert trajectory.written[-1]
    assert sorted(each.reward for each in found.values()) == [0.0, 1.0, 2.0, 3.0]


async def test_a_repeated_call_gets_the_same_answer(agent: Agent) -> None:
    ticket = (await agent.take())["ticket"]
    first = await agent.answer(ticket, ids("+31>"))
    assert await agent.answer(ticket, ids("+31>")) == first
    status, record = await agent.get(f"/v1/episodes/{ticket}")
    assert (status, record["turns"]) == (200, 1)
    start = len(ids("+31>"))
    [branch] = record["branches"]
    assert branch["token_ids"] == [*ids("+31>"), *first]
    assert branch["written"] == [[start, start + len(first)]]
    assert branch["versions"] == [[start, start + len(first), 0]]


async def test_a_call_that_does_not_extend_the_episode_begins_a_branch(agent: Agent) -> None:
    """The earlier branch is trained on. The new branch repeats its tokens as context, which is not."""
    for number in range(4):
        taken = await agent.take()
        ticket, said = taken["ticket"], ids("+31>")
        first = await agent.answer(ticket, said)
        other = [*said[:-1], *first, *ids("+2>")]  # without the sign that asked for the answer
        second = await agent.answer(ticket, other)
        third = await agent.answer(ticket, [*other, *second, *ids("+1>")])
        _, record = await agent.get(f"/v1/episodes/{ticket}")
        assert record["branched"] == {"tokens": 1}
        trace = [
            {"token_ids": each["token_ids"], "written": each["written"]}
            for each in record["branches"]
        ]
        assert trace[1]["token_ids"] == [*other, *second, *ids("+1>"), *third]
        status, told = await agent.end(ticket, reward=float(number % 2), trace=trace)
        assert (status, told["branches"], told["written"]) == (200, 2, len(first + second + third))
    batch = await first_batch(agent)
    for group in batch.groups:
        assert group.episodes == [0, 0, 1, 1]
        assert [each.branch for each in group.trajectories] == [0, 1, 0, 1]
        assert len({each.reward for each in group.trajectories[:2]}) == 1


async def test_an_episode_whose_tokens_the_agent_reports_otherwise_is_not_trained_on(
    agent: Agent,
) -> None:
    taken = await agent.take()
    ticket, said = taken["ticket"], ids("+31>")
    first = await agent.answer(ticket, said)
    start = len(said)
    trace = [{"token_ids": [*said, *first], "written": [[start - 1, start + len(first)]]}]
    status, told = await agent.end(ticket, reward=1.0, trace=trace)
    assert (status, told["differs"]) == (200, "branch 0: other tokens were written")
    for number in range(5):
        await agent.play(1, reward=float(number))
    batch = await first_batch(agent)
    assert [group.left_out for group in batch.groups] == [(taken["sample"],), ()]


async def test_an_episode_ends_once_and_a_repeated_end_is_answered(agent: Agent) -> None:
    ticket = (await agent.take())["ticket"]
    assert (await agent.end(ticket, reward=1.0))[0] == 400, "nothing was written"
    await agent.answer(ticket, ids("+31>"))
    assert (await agent.end(ticket, reward=1.0, error="both"))[0] == 400
    assert (await agent.end(ticket))[0] == 400
    assert (await agent.end(ticket, reward=float(10**300)))[0] == 400
    ends = await asyncio.gather(*(agent.end(ticket, reward=1.0, parts={"a": 1}) for _ in range(3)))
    assert {status for status, _ in ends} == {200}
    assert (await agent.end(ticket, reward=0.0))[0] == 409
    status, said = await agent.call(ticket, ids("+31>"))
    assert (status, said["error"]["code"]) == (410, "over")


async def test_a_silent_agent_loses_its_episode_and_another_one_gets_it(tmp_path: Path) -> None:
    async with an_agent(tmp_path, **SILENT) as agent:
        await agent.site.worker("box")
        lost = await agent.take()
        assert (lost["sample"], lost["silence_s"]) == (0, 0.2)
        async with asyncio.timeout(HANG_S):
            at = lost["group"], lost["sample"]
            while ((again := await agent.take())["group"], again["sample"]) != at:
                pass
        assert again["ticket"] != lost["ticket"]
        status, said = await agent.call(lost["ticket"], ids("+31>"))
        assert (status, said["error"]["code"]) == (410, "over")
        assert (await agent.end(lost["ticket"], reward=9.0))[0] == 410


async def test_an_agent_that_repeats_the_same_call_counts_as_silent(
    tmp_path: Path,
) -> None:
    async with an_agent(tmp_path, **SILENT) as agent:
        await agent.site.worker("box")
        ticket = (await agent.take())["ticket"]
        await agent.answer(ticket, ids("+31>"))
        async with asyncio.timeout(HANG_S):
            while (await agent.call(ticket, ids("+31>")))[0] == 200:
                pass
        assert (await agent.call(ticket, ids("+31>")))[0] == 410


async def test_no_agent_plays_without_a_good_ticket(agent: Agent) -> None:
    site = agent.site
    taken = await agent.take()
    ticket: str = taken["ticket"]
    gateway, viewer = await site.secret("caller"), await site.secret("eye", "viewer")
    assert (await agent.post("/v1/episodes", {}, secret=gateway))[0] == 403, "may not say rewards"
    assert (await agent.post("/v1/episodes", {}, secret=viewer))[0] == 403
    assert (await agent.post("/v1/episodes", {}))[0] == 401
    data = bytearray(base64.urlsafe_b64decode(ticket[3:] + "=="))
    data[8] ^= 1  # the sample
    of_another = "ep_" + base64.urlsafe_b64encode(data).rstrip(b"=").decode()
    stolen, _ = make_ticket(bytes(32), taken["group"], taken["sample"])
    for bad in (of_another, stolen, ticket[:-1], ticket + "A", "ep_", "ep_" + "A" * 500):
        assert (await agent.call(bad, ids("+31>")))[0] == 401, bad
        assert (await agent.end(bad, reward=1.0))[0] == 401
        assert (await agent.get(f"/v1/episodes/{bad}"))[0] == 401
        assert (await agent.post("/v1/models", {}, ticket=bad))[0] in (401, 405)
    assert len(await agent.answer(ticket, ids("+31>"))) > 0


async def test_two_clients_with_one_ticket_are_answered_one_after_the_other(agent: Agent) -> None:
    taken = await agent.take()
    asks = [ids("+31>"), ids("+99>")]
    answers = await asyncio.gather(*(agent.answer(taken["ticket"], ask) for ask in asks))
    _, record = await agent.get(f"/v1/episodes/{taken['ticket']}")
    assert record["turns"] == 2
    said = [[*ask, *answer] for ask, answer in zip(asks, answers, strict=True)]
    assert sorted(branch["token_ids"] for branch in record["branches"]) == sorted(said)


async def test_a_call_that_asks_for_another_sampling_is_refused(agent: Agent) -> None:
    ticket = (await agent.take())["ticket"]
    for params, words in (
        ({"temperature": 0.5}, "temperature: this episode is sampled with 1"),
        ({"top_p": 0.9}, "top_p"),
        ({"max_tokens": LENGTH - 1}, f"max_tokens: an answer may have {LENGTH} here"),
        ({"n": 2}, "n: an episode has one answer"),
        ({"stop": ["3"]}, "stop: answers end at"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"seed": 3}, "seed: the run draws its own"),
    ):
        status, said = await agent.call(ticket, ids("+31>"), **params)
        assert status == 400
        assert words in said["error"]["message"]
    status, _ = await agent.call(ticket, ids("+31>"), temperature=1.0, max_tokens=100, top_k=-1)
    assert status == 200
    status, said = await agent.call(ticket, ids("31>"))
    assert status == 400
    assert "do not begin with those that all calls" in said["error"]["message"]


async def test_an_episode_without_room_is_full_but_can_still_be_ended(tmp_path: Path) -> None:
    async with an_agent(tmp_path, **FEW_TURNS) as agent:
        await agent.site.worker("box")
        ticket, tokens = (await agent.take())["ticket"], ids("+31>")
        status, said = await agent.call(ticket, ids("+" + "1" * 70 + ">"))
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        for _ in range(2):
            tokens = [*tokens, *await agent.answer(ticket, tokens), *ids("+2>")]
        status, said = await agent.call(ticket, tokens)
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        assert (await agent.end(ticket, reward=1.0))[0] == 200


async def test_the_official_client_plays_with_its_ticket_as_api_key(tmp_path: Path) -> None:
    """An answer that comes back unchanged keeps its tokens; a changed one begins a branch."""
    async with an_agent_of_text(tmp_path) as agent:
        taken = await agent.take()
        url, key = f"{agent.site.url}/v1", taken["ticket"]
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        assert [model.id for model in (await client.models.list()).data] == ["policy"]
        messages: list[Any] = [{"role": "user", "content": "31 <|im_end|>"}]
        ask: Any = {"model": "policy", "messages": messages}
        said = await client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
        again = await client.chat.completions.create(**ask)
        assert again.choices[0].message.content == said.choices[0].message.content
        # Such tokens mean nothing as text: rendered again, they would be other ones.
        messages += [said.choices[0].message.model_dump(), {"role": "user", "content": "11"}]
        await client.chat.completions.create(**ask)
        _, record = await agent.get(f"/v1/episodes/{key}")
        assert (record["turns"], record["branched"]) == (2, {})
        [branch] = record["branches"]
        first = (said.choices[0].model_extra or {})["token_ids"]
        (start, end), (second, _) = branch["written"]
        assert branch["token_ids"][start:end] == first
        behind = "\n<|im_start|>user\n11<|im_end|>\n<|im_start|>assistant\n"
        end_token = chat_tokenizer().token_to_id("<|im_end|>")
        given = chat_tokenizer().encode(behind).ids
        expected = given if first[-1] == end_token else [end_token, *given]
        assert branch["token_ids"][end:second] == expected

        changed = {"role": "assistant", "content": "no"}
        rewritten: Any = [messages[0], changed, *messages[2:]]
        reply = await client.chat.completions.create(
            model="policy", messages=rewritten, stream=True
        )
        assert [chunk.choices[0].finish_reason async for chunk in reply][-1] in ("stop", "length")
        _, record = await agent.get(f"/v1/episodes/{key}")
        assert (record["turns"], record["branched"]) == (3, {"rewritten": 1})
        await client.close()


async def test_a_huge_message_is_refused_and_the_episode_goes_on(tmp_path: Path) -> None:
    async with an_agent_of_text(tmp_path) as agent:
        ticket = (await agent.take())["ticket"]
        # A mebibyte is the most that the gateway reads of a call.
        messages = [{"role": "user", "content": "1 " * ((1 << 19) - 200)}]
        body = {"model": "policy", "messages": messages}
        status, said = await agent.post("/v1/chat/completions", body, secret=ticket)
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        body = {"model": "policy", "messages": [{"role": "user", "content": "31"}]}
        assert (await agent.post("/v1/chat/completions", body, secret=ticket))[0] == 200


async def test_the_program_in_the_docs_plays_an_episode(tmp_path: Path) -> None:
    page = await asyncio.to_thread(PAGE.read_text)
    [program] = [
        block.partition("```")[0] for block in page.split("```python\n") if "/v1/episodes" in block
    ]
    async with an_agent_of_text(tmp_path) as agent:
        command = ("-c", program, agent.site.url, await agent.site.secret("docs", "agent"))
        process = await asyncio.to_thread(subprocess.Popen, (sys.executable, *command))
        try:
            batch = await first_batch(agent)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)
    trajectories = [each for group in batch.groups for each in group.trajectories]
    assert [each.turns for each in trajectories] == [3] * 4, "nobody guesses by chance"
    assert {each.branch for each in trajectories} == {0}
    assert all(each.reward_parts == {"turns": 3.0} for each in trajectories)


@asynccontextmanager
async def an_agent_of_text(directory: Path) -> AsyncIterator[Agent]:
    """The run has a tokenizer and a chat template of the usual kind, and a worker."""
    base = await asyncio.to_thread(_chat_model, directory / "base")
    vocab = chat_tokenizer().get_vocab_size()
    changes: dict[str, Any] = {
        "run.base_model": base,
        "sampling.vocab_size": vocab,
        "task.options": {},
        "gateway.chat_template": None,
    }
    async with an_agent(directory, **changes) as agent:
        await agent.site.worker("box", vocab_size=vocab)
        yield agent


def _chat_model(path: Path) -> Path:
    make_snapshot(path)
    tokenizer = chat_tokenizer()
    ends = tokenizer.token_to_id("<|im_end|>")
    config = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": ends}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return path


async def test_an_episode_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Its ticket, its turns and its end survive the coordinator; the last call may be made again."""
    async with an_agent(tmp_path) as agent:
        await agent.site.worker("box")
        ticket = (await agent.take())["ticket"]
        tokens = ids("+31>")
        tokens += await agent.answer(ticket, tokens)
        done = (await agent.take())["ticket"]
        await agent.answer(done, ids("+31>"))
        assert (await agent.end(done, reward=0.5))[0] == 200
        fresh = (await agent.take())["ticket"]
    async with an_agent(tmp_path, "robot2") as agent:
        await agent.site.worker("two")
        assert await agent.answer(ticket, ids("+31>")) == tokens[4:], "not written again"
        more = [*tokens, *ids("+1>")]
        more += await agent.answer(ticket, more)
        _, record = await agent.get(f"/v1/episodes/{ticket}")
        assert [branch["token_ids"] for branch in record["branches"]] == [more]
        assert (await agent.end(ticket, reward=1.0))[0] == 200
        assert (await agent.end(done, reward=0.5))[0] == 200
        assert (await agent.end(done, reward=1.0))[0] == 409
        status, said = await agent.call(fresh, ids("+31>"))
        assert (status, said["error"]["code"]) == (410, "over"), "it had not called before"
