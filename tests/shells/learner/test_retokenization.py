"""The learner reads the tokens of a conversation that the engine wrote, not those of its text.

    engine --answer's tokens--> environment in text --turns' tokens--> engine --> ... --> batch --> learner

The tokenizer makes one token of "11", and the model writes "1" and "1". All parts are those of a run, except for the
coordinator between them (`tests/nightly/runs/test_retokenization.py`, with one turn).
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PhiConfig

from echo2d.client import Batch, read_batch
from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.protocol.control_messages import Finish
from echo2d.core.protocol.trajectory import (
    NOTHING,
    AuthoredSpan,
    BatchBody,
    GroupRecord,
    Partial,
    TrajectoryRecord,
    batch_digest,
    pack_batch,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine import TorchEngine
from echo2d.learner.batch.checks import BatchRules, Trained, faults
from echo2d.learner.batch.packing import answers_of, micro_batches
from echo2d.learner.model.load import load_model
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.tasks.environment import End, Environment, EnvironmentAnswer, Turn
from echo2d.tasks.served_environment import ServedEnvironment
from echo2d.tasks.served_task import ModelFiles
from echo2d.texts.files import read_text_files
from tests.support.texts import chat_tokenizer, write_chat_model

EPISODES, GROUP, TURNS = 500, 10, 3
ANSWER_TOKENS_MAX = 8
CLOSE = 1e-4
ROW_TOKENS = 4096
TOKENIZER = chat_tokenizer()
RULES = BatchRules(0, EPISODES // GROUP, GROUP, TOKENIZER.get_vocab_size(), GROUP)


class Tally(Environment):
    """The environment asks for strokes, TURNS times."""

    name = "tally"

    def reset(self, row: int, seed: int) -> Turn:
        self._turns = 0
        return Turn([{"role": "user", "content": f"{row}"}])

    def step(self, answer: EnvironmentAnswer) -> Turn | End:
        self._turns += 1
        if self._turns == TURNS:
            return End(float(len(answer.text)))
        return Turn([{"role": "user", "content": "11" * self._turns}])


@dataclass(frozen=True)
class Played:
    """One episode: its prompt, and what was written and given behind it."""

    row: int
    prompt: bytes
    output: Partial
    finish: Finish
    reward: float


def token(text: str) -> int:
    found: int | None = TOKENIZER.token_to_id(text)
    assert found is not None
    return found


STROKE, END = token("1"), token("<|im_end|>")


def by_version_1(start: int, end: int) -> AuthoredSpan:
    return AuthoredSpan(start, end, Version(1), Digest(bytes(32)), PeerId("w"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that often writes "1" and often ends its answer."""
    directory = tmp_path_factory.mktemp("model")
    config = PhiConfig(
        vocab_size=TOKENIZER.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        made.lm_head.bias[[STROKE, END]] += torch.tensor([8.0, 9.0])
    made.save_pretrained(directory)
    return write_chat_model(directory)


def served(model: Path) -> ServedEnvironment:
    texts = ModelFiles(str(model), read_text_files(model), None, "", {})
    return ServedEnvironment(Tally(), Tally, texts)


async def played(model: Path, environment: ServedEnvironment) -> list[Played]:
    engine = TorchEngine(slots_max=EPISODES, threads=1)
    await engine.start()
    await engine.refit(model, "1-aa")
    try:
        numbers = range(EPISODES)
        return list(await asyncio.gather(*(play(engine, environment, each) for each in numbers)))
    finally:
        await engine.close()


async def play(engine: TorchEngine, environment: ServedEnvironment, number: int) -> Played:
    row = number // GROUP
    _, prompt, state, *_ = environment.answer_at_once(["reset", number, row, number])
    output = NOTHING
    for turn in range(TURNS):
        start = output.length
        finish: Any = None
        request = GenerateRequest(
            f"{number}.{turn}",
            unpack_tokens(prompt + output.tokens).tolist(),
            samples=1,
            max_new_tokens=ANSWER_TOKENS_MAX,
            stop_token_ids=[END],
            rng_seeds=[number],
            written=output.written,
        )
        async for delta in engine.generate(request):
            finish = delta.finish or finish
            spans = [by_version_1(each.start, each.end) for each in delta.spans]
            packed = pack_tokens(delta.tokens), pack_logprobs(delta.logprobs)
            output = output.plus(*packed, spans, shift=start)
        so_far = prompt + output.tokens[: 4 * start]
        said = environment.answer_at_once(
            ["step", number, turn, state, so_far, output.tokens[4 * start :], finish]
        )
        if said[0] == "end":
            return Played(row, prompt, output, finish, said[1])
        _, given, state, *_ = said
        output = output.with_given(given)
    raise AssertionError("the environment never ended it")


def batch_of(episodes: Sequence[Played]) -> Batch:
    """The batch as the learner takes it from the coordinator."""
    groups = tuple(
        GroupRecord(
            GroupId(members[0].row),
            members[0].prompt,
            tuple(record(sample, each) for sample, each in enumerate(members)),
        )
        for first in range(0, EPISODES, GROUP)
        for members in [episodes[first : first + GROUP]]
    )
    body = pack_batch(BatchBody(2, len(episodes), groups))
    return read_batch(1, batch_digest(body).hex(), body)


def record(sample: int, episode: Played) -> TrajectoryRecord:
    output = episode.output
    return TrajectoryRecord(
        sample,
        output.tokens,
        output.logprobs,
        output.spans,
        episode.finish,
        episode.reward,
        given=output.given,
        turns=TURNS,
    )


def errors(model: Path, episodes: Sequence[Played]) -> NDArray[np.float32]:
    """The largest |learner's logprob - recorded one| of each episode's written tokens."""
    batch = batch_of(episodes)
    assert faults(batch, 2, RULES, Trained()) == {}
    answers = [
        each for group in answers_of(batch, RULES, lambda rewards: rewards) for each in group
    ]
    scorer = AnswerScorer(load_model(model).eval())
    assert scorer.packed
    found = np.zeros(EPISODES, dtype=np.float32)
    for micro in micro_batches(answers, ROW_TOKENS, packed=True):
        with torch.no_grad():
            logprobs_n = scorer(micro).logprobs_n.numpy()
        numbers = np.array([group * GROUP + sample for group, sample in micro.trajectories])
        np.maximum.at(
            found, numbers[micro.answers_n], np.abs(logprobs_n - micro.rollout_logprobs_n)
        )
    return found


# A run that makes tokens of the conversation's text


def rendered_again(episode: Played) -> Played:
    """The same episode, whose text was made tokens once more.

    A token's recorded logprob is that of its text: the sum over the tokens that wrote it.
    """
    logprobs, tokens = episode.output.logprobs, unpack_tokens(episode.output.tokens).tolist()
    made = NOTHING
    for start, end, is_given in runs(episode.output):
        again = TOKENIZER.encode(text_of(tokens[start:end]), add_special_tokens=False).ids
        if is_given:
            made = made.with_given(pack_tokens(again))
            continue
        sums = np.cumsum(np.frombuffer(logprobs, dtype="<f4")[start:end])
        of_text = np.interp(ends_of(again), [0, *ends_of(tokens[start:end])], [0, *sums])
        packed = pack_tokens(again), pack_logprobs(np.minimum(np.diff(of_text, prepend=0), 0))
        made = made.plus(*packed, [by_version_1(0, len(again))], shift=made.length)
    whole = unpack_tokens(episode.prompt + made.tokens).tolist()
    assert whole == TOKENIZER.encode(text_of(whole), add_special_tokens=False).ids
    return replace(episode, output=made)


def runs(output: Partial) -> Iterator[tuple[int, int, bool]]:
    """Start and end of each run of written or given tokens, and whether it was given."""
    given = {each.start for each in output.given}
    edges = {place for each in output.given for place in (each.start, each.end)}
    for start, end in pairwise(sorted({0, *edges, output.length})):
        yield start, end, start in given


def text_of(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def ends_of(tokens: Sequence[int]) -> NDArray[np.int64]:
    """Where each token ends in the text, in characters."""
    return np.cumsum([len(text_of([each])) for each in tokens])


def test_500_conversations_are_read_by_their_tokens_and_not_by_their_text(model: Path) -> None:
    episodes = asyncio.run(played(model, served(model)))
    assert [len(each.output.given) for each in episodes] == [TURNS - 1] * EPISODES
    again = [rendered_again(each) for each in episodes]
    trapped = np.array(
        [
            one.output.tokens != other.output.tokens
            for one, other in zip(episodes, again, strict=True)
        ]
    )
    merged = [pack_tokens([STROKE, STROKE]) in each.output.tokens for each in episodes]
    assert EPISODES // 2 < sum(merged) < EPISODES, "the trap is set"
    assert trapped[merged].all()
    written, from_text = errors(model, episodes), errors(model, again)
    assert written.max() < CLOSE
    assert (from_text[trapped] > CLOSE).all()
    # The others' text has the same tokens.
    assert 0 < from_text[~trapped].max() < CLOSE
    print(f"{trapped.sum()} of {EPISODES} fail through text; else {written.max():.1e} at most")  # noqa: T201
