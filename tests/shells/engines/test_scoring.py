"""One prefill shows whether an answer was drawn by the rules."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from echo2d.core.protocol.evidence import Evidence, evidence
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.protocol.seeds import SEED_BITS
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine import scoring
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.engines.torch_engine.scoring import Replay, ScoredAnswer, score
from echo2d_lab.bench.audit.gumbel_writer import write_gumbel
from tests.support.engine_harness import VOCAB_SIZE, save_random_model, tiny_config

PROMPT = [3, 4, 5]
SEEDS = tuple(range(40, 56))
TOKENS = 30


def saved(folder: Path, version: int = 0) -> Path:
    save_random_model(folder, tiny_config(), rng_seed=version)
    return folder


SAMPLINGS = [
    WHOLE,
    Sampling(0.7),
    Sampling(1.3, 0.8),
    Sampling(top_k=5),
    Sampling(1.5, min_p=0.3),
    Sampling(1.2, 0.9, 7, 0.05),
]


def policy_of(snapshot: Path) -> InferencePolicy:
    with torch.inference_mode():
        return build(prepare(snapshot, None, torch.float32), torch.float32, torch.device("cpu"))


async def written(
    snapshot: Path, *, sampling: Sampling = WHOLE
) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of one answer for each of SEEDS."""
    engine = TorchEngine(threads=1)
    await engine.start()
    await engine.refit(snapshot, "0-a")
    request = GenerateRequest("r", PROMPT, len(SEEDS), TOKENS, sampling, rng_seeds=SEEDS)
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in SEEDS]
    async for delta in engine.generate(request):
        found[delta.sample][0].extend(delta.tokens)
        found[delta.sample][1].extend(delta.logprobs)
    await engine.close()
    return found


def written_as_sglang(
    policy: InferencePolicy,
    seeds: Sequence[int] = SEEDS,
    *,
    sampling: Sampling = WHOLE,
    by_rank: bool = False,
) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of one answer for each seed."""
    return write_gumbel(
        policy,
        [PROMPT] * len(seeds),
        seeds,
        tokens=TOKENS,
        ends=(),
        sampling=sampling,
        by_rank=by_rank,
    )


def weighed(scored: ScoredAnswer, claimed: list[float]) -> Evidence:
    return evidence(
        scored.logprobs,
        np.array(claimed),
        surprises=scored.surprises,
        entropies=scored.entropies,
        variances=scored.variances,
        colds=scored.colds,
        hots=scored.hots,
        distances=scored.distances,
    )


@pytest.mark.may_block
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_an_honest_answer_has_the_tokens_that_its_seed_points_to(
    tmp_path: Path, sampling: Sampling
) -> None:
    answers = await written(saved(tmp_path), sampling=sampling)
    policy, zs = policy_of(tmp_path), []
    for seed, (tokens, logprobs) in zip(SEEDS, answers, strict=True):
        scored = score(policy, PROMPT, tokens, sampling=sampling, seed=seed)
        found = weighed(scored, logprobs)
        assert found.k < 1e-4
        assert found.missed == 0
        zs.append(found.z)
    assert abs(np.mean(zs)) < 1.0


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_an_answer_of_sglang_has_the_largest_noise(
    tmp_path: Path, sampling: Sampling, by_rank: bool
) -> None:
    policy, zs = policy_of(saved(tmp_path)), []
    answers = written_as_sglang(policy, sampling=sampling, by_rank=by_rank)
    for seed, (tokens, logprobs) in zip(SEEDS, answers, strict=True):
        scored = score(
            policy,
            PROMPT,
            tokens,
            sampling=sampling,
            seed=seed,
            replay="sglang",
        )
        found = weighed(scored, logprobs)
        assert found.k < 1e-4
        assert found.missed == 0
        assert scored.distances is not None
        assert scored.distances.max() < 1e-3
        zs.append(found.z)
    assert abs(np.mean(zs)) < 1.0


@pytest.mark.may_block
async def test_an_answer_drawn_with_another_seed_is_noticed(tmp_path: Path) -> None:
    answers = await written(saved(tmp_path))
    policy = policy_of(tmp_path)
    as_sglang = written_as_sglang(policy)
    replays: tuple[Replay, ...] = ("torch", "sglang")
    for replay in replays:
        for seed, (tokens, _) in zip(SEEDS, answers, strict=True):
            misses = misses_of(policy, tokens, seed + 1, replay)
            assert misses > TOKENS // 3
        answers = as_sglang
    # Nor does an answer that was drawn in the other kind of engine.
    assert misses_of(policy, as_sglang[0][0], SEEDS[0], "torch") > TOKENS // 3


def misses_of(policy: InferencePolicy, answer: Sequence[int], seed: int, replay: Replay) -> int:
    scored = score(policy, PROMPT, answer, sampling=Sampling(1.0, 1.0), seed=seed, replay=replay)
    assert scored.distances is not None
    return int((scored.distances > 1).sum())


@pytest.mark.may_block
@pytest.mark.parametrize("replay", ["torch", "sglang"])
async def test_the_pieces_of_an_answer_agree_with_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay: Replay
) -> None:
    """A piece that goes on after a handover begins with another prompt."""
    snapshot = saved(tmp_path)
    policy = policy_of(snapshot)
    answers = await written(snapshot) if replay == "torch" else written_as_sglang(policy)
    for seed, (tokens, _) in zip(SEEDS, answers[:4], strict=False):
        for at in (1, 7, TOKENS - 1):
            pieces = [
                score(
                    policy,
                    [*PROMPT, *tokens[:start]],
                    tokens[start:end],
                    sampling=WHOLE,
                    seed=seed,
                    written=start,
                    replay=replay,
                )
                for start, end in ((0, at), (at, TOKENS))
            ]
            assert all(
                piece.distances is not None and piece.distances.max() <= 1 for piece in pieces
            )
        whole = score(policy, PROMPT, tokens, sampling=Sampling(1.0, 1.0), seed=seed, replay=replay)
        with monkeypatch.context() as patch:
            patch.setattr(scoring, "POSITIONS_MAX", 7)
            parts = score(
                policy, PROMPT, tokens, sampling=Sampling(1.0, 1.0), seed=seed, replay=replay
            )
        assert parts.surprises == pytest.approx(whole.surprises)
        assert parts.distances == pytest.approx(whole.distances)


@pytest.mark.may_block
async def test_a_later_turn_is_replayed_where_the_seed_goes_on(tmp_path: Path) -> None:
    """Given tokens are read by the engine and the auditor, and use no number of the seed."""
    snapshot, given = saved(tmp_path), [6, 2, 9]
    first = await written(snapshot)
    engine = TorchEngine(threads=1)
    await engine.start()
    await engine.refit(snapshot, "0-a")
    for seed, (tokens, _) in zip(SEEDS[:4], first, strict=False):
        prompt = [*PROMPT, *tokens, *given]
        request = GenerateRequest("r", prompt, 1, TOKENS, rng_seeds=[seed], written=TOKENS)
        second = [token async for delta in engine.generate(request) for token in delta.tokens]
        missed = [
            weighed(
                score(policy_of(snapshot), prompt, second, sampling=WHOLE, seed=seed, written=at),
                [0.0] * len(second),
            ).missed
            for at in (TOKENS, TOKENS + len(given))
        ]
        assert missed[0] == 0
        assert missed[1]
    await engine.close()


def test_sglang_gets_the_low_bits_of_a_seed(tmp_path: Path) -> None:
    policy = policy_of(saved(tmp_path))
    seed = (1 << SEED_BITS) - 5
    ((tokens, _),) = written_as_sglang(policy, [seed])
    assert misses_of(policy, tokens, seed, "sglang") == 0
    assert misses_of(policy, tokens, seed & 0x7FFFFFFF, "sglang") == 0


def test_without_a_seed_nothing_is_replayed(tmp_path: Path) -> None:
    scored = score(policy_of(saved(tmp_path)), PROMPT, [1, 2], sampling=Sampling(1.0, 1.0))
    assert scored.distances is None


@pytest.mark.may_block
async def test_an_answer_of_another_version_has_other_logprobs(tmp_path: Path) -> None:
    answers = await written(saved(tmp_path / "0"))
    policy = policy_of(saved(tmp_path / "1", 1))
    for tokens, logprobs in answers:
        found = weighed(score(policy, PROMPT, tokens, sampling=Sampling(1.0, 1.0)), logprobs)
        assert found.k > 0.01


@pytest.mark.parametrize("replay", ["torch", "sglang"])
def test_likely_tokens_surprise_too_little_and_made_up_ones_too_much(
    tmp_path: Path, replay: Replay
) -> None:
    """True logprobs do not help: the tokens were chosen, and not drawn."""
    policy = policy_of(saved(tmp_path))
    greedy, rare = list(PROMPT), list(PROMPT)
    with torch.inference_mode():
        for _ in range(TOKENS):
            greedy.append(int(policy.logits(torch.tensor([greedy]), 1)[0, -1].argmax()))
            rare.append(int(policy.logits(torch.tensor([rare]), 1)[0, -1].argmin()))
    for tokens, sign in ((greedy, -1), (rare, 1)):
        answer = tokens[len(PROMPT) :]
        scored = score(policy, PROMPT, answer, sampling=Sampling(1.0, 1.0), seed=7, replay=replay)
        found = weighed(scored, scored.logprobs.tolist())
        assert found.k == 0
        assert sign * found.z > 1
        assert (found.missed or 0) > TOKENS // 3


def test_the_ratios_of_drawn_tokens_are_one_on_average(tmp_path: Path) -> None:
    """Exactly: summed over all tokens that could come next, each with its chance."""
    policy = policy_of(saved(tmp_path))
    for top_p in (1.0, 0.8):
        found = [
            score(policy, PROMPT, [token], sampling=Sampling(0.7, top_p))
            for token in range(VOCAB_SIZE)
        ]
        surprises = np.array([each.surprises[0] for each in found])
        logprobs = np.array([each.logprobs[0] for each in found])
        inside = np.argsort(-logprobs)
        inside = inside[: 1 + int((np.cumsum(np.exp(logprobs[inside])) < top_p).sum())]
        chances = np.exp(-surprises[inside])
        assert chances.sum() == pytest.approx(1.0, abs=1e-6)
        for name in ("colds", "hots"):
            ratios = np.array([getattr(each, name)[0] for each in found])[inside]
            assert (chances * np.exp(ratios)).sum() == pytest.approx(1.0, abs=1e-6), (name, top_p)


def test_every_number_points_to_one_token(tmp_path: Path) -> None:
    policy, seeds = policy_of(saved(tmp_path)), range(20)
    each = [
        [
            score(policy, PROMPT, [token], sampling=Sampling(1.0, 0.9), seed=seed)
            for token in range(VOCAB_SIZE)
        ]
        for seed in seeds
    ]
    for scored in each:
        inside = [one.distances is not None and one.distances[0] == 0 for one in scored]
        assert sum(inside) == 1


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_surprises_and_entropy_are_those_of_the_tokens_within_top_p(
    tmp_path: Path, top_p: float
) -> None:
    policy = policy_of(saved(tmp_path))
    each = [
        score(policy, PROMPT, [token], sampling=Sampling(1.0, top_p)) for token in range(VOCAB_SIZE)
    ]
    logprobs = np.array([float(one.logprobs[0]) for one in each])
    surprises = np.array([float(one.surprises[0]) for one in each])
    ordered = np.sort(np.exp(logprobs))[::-1]
    inside = logprobs >= np.log(ordered[np.cumsum(ordered) - ordered < top_p].min()) - 1e-9
    assert inside.sum() == VOCAB_SIZE if top_p == 1 else 1 < inside.sum() < VOCAB_SIZE
    shares = np.exp(-surprises)[inside]
    assert shares.sum() == pytest.approx(1.0)
    entropy = float((shares * surprises[inside]).sum())
    assert float(each[0].entropies[0]) == pytest.approx(entropy)
    # A token beyond the border is unlikely, but rounding may have put it there.
    assert surprises.max() < 30
