"""The parts of the torch engine, and its behaviour beyond the contract suite."""

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    GPT2Config,
    Lfm2Config,
    MambaConfig,
    MistralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from echo2d.core.protocol.answer_end import OutputLimit
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.engines.base import Engine, GenerateRequest, SampleOutput
from echo2d.engines.layout import TensorSpec, file_tensor_digests
from echo2d.engines.stream import RequestStream
from echo2d.engines.torch_engine import TorchEngine
from echo2d.engines.torch_engine.batch import PREFILL_TOKENS_MAX, DecodeBatch
from echo2d.engines.torch_engine.decoder import Decoder, DecoderOptions, DecoderOutput
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.engines.torch_engine.sampling import draw
from echo2d.errors import EngineFault, OperatorFault
from tests.support.engine_harness import (
    VOCAB_SIZE,
    load_model,
    save_random_model,
    score,
    tiny_config,
)

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
LLAMA_LIKE = SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3": tiny_config(),
    "window of 4": MistralConfig(**LLAMA_LIKE, sliding_window=4),
    "experts": Qwen3MoeConfig(**LLAMA_LIKE, **MOE),
    "learned positions": GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "alibi": BloomConfig(**SMALL, hidden_size=32, n_layer=2, n_head=4),
}


def saved(folder: Path, rng_seed: int = 0, **changes: Any) -> Path:
    save_random_model(folder, tiny_config(**changes), rng_seed=rng_seed)
    return folder


def loaded(snapshot: Path) -> InferencePolicy:
    return build(prepare(snapshot, None, torch.float32), torch.float32, CPU)


# sampling


def table(
    rows: int, sampling: Sampling = WHOLE, uniform: Sequence[float] | None = None
) -> tuple[list[Sampling], list[float]]:
    return [sampling] * rows, list(uniform) if uniform is not None else [0.5] * rows


def test_tokens_are_drawn_by_their_probability() -> None:
    """Evenly spread uniforms meet each token in proportion to its probability at this temperature."""
    logits = torch.tensor([[0.0, 1.0, 3.0, -2.0]])
    count = 1000
    chances = table(count, Sampling(2.0), uniform=[(i + 0.5) / count for i in range(count)])
    tokens, logprobs = draw(logits.expand(count, 4), *chances)
    truth = torch.log_softmax(logits[0] / 2.0, dim=-1)
    assert logprobs == pytest.approx(truth[torch.tensor(tokens)].tolist(), abs=1e-6)
    for token in range(4):
        assert tokens.count(token) / count == pytest.approx(
            truth[token].exp().item(), abs=2 / count
        )


def test_greedy_sampling_takes_the_likeliest_token_and_scores_it_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, -2.0]])
    tokens, logprobs = draw(logits, *table(1, Sampling(0.0), uniform=[0.0]))
    assert tokens == [2]
    assert logprobs == pytest.approx([torch.log_softmax(logits[0], dim=-1)[2].item()])


def test_top_p_limits_the_draw_but_not_the_logprob() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(100, 4)
    uniform = [i / 100 for i in range(100)]
    tokens, logprobs = draw(logits, *table(100, Sampling(top_p=0.6), uniform=uniform))
    assert set(tokens) == {0, 1}
    assert tokens.count(0) == pytest.approx(100 * 0.5 / 0.8, abs=1)
    assert logprobs[0] == pytest.approx(torch.tensor(0.5).log().item())
    assert set(draw(logits, *table(100, Sampling(top_p=1e-6), uniform=uniform))[0]) == {0}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_an_impossible_token_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-1e9, 0.0, 0.0, -1e9]])
    assert draw(logits, *table(1, uniform=[uniform]))[0][0] in {1, 2}


def test_each_row_has_its_own_parameters() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, -2.0]]).expand(3, 4)
    mixed = draw(logits, [Sampling(0.0), Sampling(1.0, 0.5), Sampling(0.5)], [0.1, 0.9, 0.3])
    alone = [
        draw(logits[:1], [Sampling(t, p)], [u])
        for t, p, u in [(0.0, 1.0, 0.1), (1.0, 0.5, 0.9), (0.5, 1.0, 0.3)]
    ]
    assert mixed == ([one[0][0] for one in alone], [one[1][0] for one in alone])


# batch


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_come_and_go_without_touching_the_others(tmp_path: Path, family: str) -> None:
    """Random arrivals and departures: each row's logits stay those of a full forward pass over its tokens alone."""
    save_random_model(tmp_path, FAMILIES[family], rng_seed=1)
    chance, model = random.Random(0), load_model(tmp_path)
    batch, rows = DecodeBatch(loaded(tmp_path)), list[list[int]]()
    with torch.inference_mode():
        for _ in range(12):
            contexts = [
                [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 9))]
                for _ in range(2)
            ]
            batch.add(contexts, [1, 2])
            batch.check()
            rows += [list(contexts[row]) for row in (0, 1, 1)]
            kept = [row for row in range(len(rows)) if chance.random() < 0.7]
            batch.keep(kept)
            batch.check()
            rows = [rows[row] for row in kept]
            if rows:
                tokens = [chance.randrange(VOCAB_SIZE) for _ in rows]
                batch.step(tokens)
                batch.check()
                rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
                truth = torch.cat(
                    [
                        model(input_ids=torch.tensor([row]), use_cache=False).logits[:, -1]
                        for row in rows
                    ]
                )
                assert (batch.logits - truth).abs().max() < 1e-4
        batch.keep([])
        batch.check()


def test_a_long_prefill_is_cut_into_passes(tmp_path: Path) -> None:
    save_random_model(tmp_path, tiny_config(), rng_seed=1)
    policy = loaded(tmp_path)
    together, apart = DecodeBatch(policy), DecodeBatch(policy)
    contexts = [[i % VOCAB_SIZE] * (PREFILL_TOKENS_MAX // 4 + i) for i in range(6)]
    with torch.inference_mode():
        together.add(contexts, [1] * 6)
        together.check()
        for context in contexts:
            apart.add([context], [1])
    assert (together.logits - apart.logits).abs().max() < 1e-4


def test_a_prompt_that_comes_again_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model(tmp_path, tiny_config(), rng_seed=1)
    policy, computed = loaded(tmp_path), list[int]()
    forward = policy.next_logits

    def counted(ids: torch.Tensor, *rest: Any) -> Any:
        computed.append(ids.numel())
        return forward(ids, *rest)

    monkeypatch.setattr(policy, "next_logits", counted)
    batch = DecodeBatch(policy)
    prompt, other = [1, 2, 3, 4], [5, 6]
    with torch.inference_mode():
        batch.add([prompt, prompt, other], [1, 2, 1])
        first = batch.logits.clone()
        batch.keep([3])
        batch.add([prompt], [2])
        batch.check()
        assert torch.equal(batch.logits[1:], first[[0, 0]])
        assert computed == [8]  # two rows of four, padding included
        batch.step([1, 2, 2])
        truth = load_model(tmp_path)(input_ids=torch.tensor([[*prompt, 2]]), use_cache=False)
        assert (batch.logits[1:] - truth.logits[:, -1]).abs().max() < 1e-4
        # Others take its place.
        batch.add([other, prompt], [1, 1], kept_bytes=0)
        batch.add([prompt], [1])
    assert computed == [8, 3, 4]


# policy


SIZES_OF_ALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2),
        Lfm2Config(**SIZES_OF_ALL, layer_types=["conv", "full_attention"] * 2),
        Qwen3NextConfig(
            **SIZES_OF_ALL, linear_num_value_heads=4, linear_num_key_heads=2, num_experts=4
        ),
    ],
    ids=lambda config: str(config.model_type),
)
def test_a_model_with_layers_without_attention_is_refused(config: Any, tmp_path: Path) -> None:
    save_random_model(tmp_path, config, rng_seed=0)
    with pytest.raises(
        EngineFault, match=r"^the torch engine serves only models that keep .* use SGLang"
    ):
        loaded(tmp_path)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_a_weight_that_is_no_number_is_named_with_its_file(tmp_path: Path, number: float) -> None:
    path = saved(tmp_path / "one") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = number
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(EngineFault, match=f"model.norm.weight in {path} holds NaN or infinity: "):
        loaded(tmp_path / "one")


def test_preparing_touches_no_weight(tmp_path: Path) -> None:
    for version in (0, 1):
        save_random_model(tmp_path / str(version), tiny_config(), rng_seed=version)
    policy = loaded(tmp_path / "0")
    prepared = prepare(tmp_path / "1", policy, torch.float32)
    assert policy.digests() == file_tensor_digests(tmp_path / "0")
    assert prepared.target is policy
    policy.copy(prepared.tensors, prepared.layout)
    assert policy.digests() == file_tensor_digests(tmp_path / "1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_serves_on_when_its_loaded_files_change(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """A later version is written into them while this one may still be served."""
    snapshot = saved(tmp_path / "one")
    policy = build(prepare(snapshot, None, dtype), dtype, CPU)
    before = policy.digests()
    weights = snapshot / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(bytes(weights.stat().st_size // 2))
    assert policy.digests() == before


def test_a_model_with_other_weight_names_is_built_again(tmp_path: Path) -> None:
    """transformers computes with the experts of a layer in one tensor; the files hold one each."""
    save_random_model(tmp_path, FAMILIES["experts"], rng_seed=0)
    policy = loaded(tmp_path)
    assert prepare(tmp_path, policy, torch.float32).target is None
    assert policy.digests() == file_tensor_digests(tmp_path)


def test_weights_of_unknown_origin_have_no_digests(tmp_path: Path) -> None:
    """Here the files have a name that transformers cannot make of the model's."""
    save_random_model(tmp_path, FAMILIES["experts"], rng_seed=0)
    policy = loaded(tmp_path)
    spec = TensorSpec("BF16", (1,))
    policy._layout = dataclasses.replace(
        policy.layout, tensors={**policy.layout.tensors, "other": spec}
    )
    assert policy.digests() is None


@pytest.mark.may_block
async def test_a_mixture_of_experts_is_served_and_compared_with_its_files(tmp_path: Path) -> None:
    """Its files have a tensor for each expert, and transformers has one for all of a layer."""
    engine = TorchEngine(threads=1)
    await engine.start()
    for version in range(2):
        snapshot = tmp_path / str(version)
        save_random_model(snapshot, FAMILIES["experts"], rng_seed=version)
        await engine.refit(snapshot, f"{version}-a")
        assert await engine.tensor_digests() == file_tensor_digests(snapshot)
        found = await deltas(engine, GenerateRequest(f"r{version}", [1, 2], 1, 9))
        logprobs = [logprob for delta in found for logprob in delta.logprobs]
        truth = score(load_model(snapshot), [1, 2], tokens_of(found), 1.0)
        assert logprobs == pytest.approx(truth, abs=1e-3)
    await engine.close()


# decoder


def decoder(emitted: list[DecoderOutput]) -> Decoder:
    return Decoder(
        DecoderOptions(CPU, torch.float32, slots_max=4, tokens_per_s_max=None, threads=1),
        emitted.append,
    )


def test_tensors_for_another_model_are_not_copied_into_this_one(tmp_path: Path) -> None:
    """A refit that was prepared before another model took over."""
    shallow, deep = saved(tmp_path / "0"), saved(tmp_path / "1", num_hidden_layers=3)
    one = decoder([])
    one.swap(prepare(shallow, one.policy, torch.float32), "0-a")
    late = prepare(shallow, one.policy, torch.float32)
    one.swap(prepare(deep, one.policy, torch.float32), "1-b")
    assert one.digests() == file_tensor_digests(deep)
    one.swap(late, "2-c")
    assert one.digests() == file_tensor_digests(shallow)
    one.check()


@pytest.mark.may_block
async def test_a_request_checked_against_another_model_ends(tmp_path: Path) -> None:
    emitted: list[DecoderOutput] = []
    one = decoder(emitted)
    one.swap(prepare(saved(tmp_path), None, torch.float32), "0-a")
    stream = RequestStream(2)
    limit = OutputLimit(5, "length")
    one.submit(
        GenerateRequest("r", [1], 2, 5), stream, seeds=(0, 0), limit=limit, checked=loaded(tmp_path)
    )
    assert [(to, delta.sample, delta.finish) for to, delta in emitted[0]] == [
        (stream, 0, "abort"),
        (stream, 1, "abort"),
    ]
    one.check()


# engine


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(threads=1)
    await engine.start()
    yield engine
    await engine.close()


async def deltas(engine: Engine, request: GenerateRequest) -> list[SampleOutput]:
    return [delta async for delta in engine.generate(request)]


def tokens_of(found: list[SampleOutput], sample: int = 0) -> list[int]:
    return [token for delta in found if delta.sample == sample for token in delta.tokens]


async def test_only_the_stop_tokens_of_the_request_end_a_sample(
    tmp_path: Path, engine: TorchEngine
) -> None:
    snapshot = saved(tmp_path)
    every = {"eos_token_id": list(range(VOCAB_SIZE))}
    (snapshot / "generation_config.json").write_text(json.dumps(every))
    await engine.refit(snapshot, "0-a")
    stops = tuple(range(0, VOCAB_SIZE, 2))
    found = await deltas(engine, GenerateRequest("r", [1], 8, 64, stop_token_ids=stops))
    for sample in range(8):
        tokens = tokens_of(found, sample)
        assert tokens[-1] % 2 == 0
        assert all(token % 2 == 1 for token in tokens[:-1])
    assert {delta.finish for delta in found} <= {None, "stop"}


async def test_a_full_context_ends_a_sample(tmp_path: Path, engine: TorchEngine) -> None:
    await engine.refit(saved(tmp_path, max_position_embeddings=8), "0-a")
    found = await deltas(engine, GenerateRequest("r", [1, 2, 3], 2, 64))
    assert [len(tokens_of(found, sample)) for sample in range(2)] == [5, 5]
    assert [delta.finish for delta in found if delta.finish] == ["context", "context"]


async def test_a_seeded_request_does_not_depend_on_its_company(
    tmp_path: Path, engine: TorchEngine
) -> None:
    await engine.refit(saved(tmp_path), "0-a")
    seeded = GenerateRequest("seeded", [1, 2], 3, 20, rng_seeds=(5, 6, 1 << 62))
    alone = await deltas(engine, seeded)
    async with asyncio.TaskGroup() as tasks:
        for i in range(5):
            tasks.create_task(deltas(engine, GenerateRequest(str(i), [i] * (i + 1), 2, 10 + i)))
        again = tasks.create_task(deltas(engine, seeded))
    for sample in range(3):
        assert tokens_of(again.result(), sample) == tokens_of(alone, sample)
    await engine.check()


async def test_the_next_attempt_goes_on_drawing_where_this_one_left_off(
    tmp_path: Path, engine: TorchEngine
) -> None:
    """An answer is the same whether one lease wrote it or two."""
    await engine.refit(saved(tmp_path), "0-a")
    for seed in range(8):
        whole = tokens_of(
            await deltas(engine, GenerateRequest("r", [1, 2], 1, 20, rng_seeds=[seed]))
        )
        for count in (1, 7, 19):
            prompt = [1, 2, *whole[:count]]
            rest = GenerateRequest("r", prompt, 1, 20 - count, rng_seeds=[seed], written=count)
            assert tokens_of(await deltas(engine, rest)) == whole[count:]


async def test_short_answers_come_in_one_delta_and_long_ones_in_bundles(
    tmp_path: Path, engine: TorchEngine
) -> None:
    await engine.refit(saved(tmp_path), "0-a")
    found = await deltas(engine, GenerateRequest("r", [1], 1, 100))
    assert max(len(delta.tokens) for delta in found) <= 16
    assert len(found) < 50


async def test_a_slow_engine_keeps_its_pace_and_delivers_tokens_soon(tmp_path: Path) -> None:
    """20 ms a step: what is held back leaves after 50 ms, so with the third or fourth step."""
    engine = TorchEngine(threads=1, tokens_per_s_max=100)
    await engine.start()
    await engine.refit(saved(tmp_path), "0-a")
    loop = asyncio.get_running_loop()
    before = loop.time()
    found = await deltas(engine, GenerateRequest("r", [1], 2, 8))
    assert loop.time() - before >= 7 * 0.02
    assert max(len(delta.tokens) for delta in found) <= 4
    await engine.close()


@pytest.mark.may_block
async def test_a_model_of_another_depth_is_built_and_running_samples_go_on(
    tmp_path: Path, engine: TorchEngine
) -> None:
    await engine.refit(saved(tmp_path / "0"), "0-a")
    deep = saved(tmp_path / "1", num_hidden_layers=3)
    stream = engine.generate(GenerateRequest("r", [1, 2], 1, 10_000))
    found = [await anext(stream)]
    await engine.refit(deep, "1-b")
    while found[-1].spans[-1].label != "1-b":
        found.append(await anext(stream))
    await engine.abort("r")
    found += [delta async for delta in stream]
    assert await engine.tensor_digests() == file_tensor_digests(deep)
    tokens, logprobs = tokens_of(found), [logprob for delta in found for logprob in delta.logprobs]
    switch = next(span.start for delta in found for span in delta.spans if span.label == "1-b")
    truth = score(load_model(deep), [1, 2], tokens, 1.0)
    assert logprobs[switch:] == pytest.approx(truth[switch:], abs=1e-3)


async def test_a_model_with_another_vocabulary_ends_running_samples(
    tmp_path: Path, engine: TorchEngine
) -> None:
    await engine.refit(saved(tmp_path / "0"), "0-a")
    stream = engine.generate(GenerateRequest("r", [1, 2], 1, 10_000))
    await anext(stream)
    await engine.refit(saved(tmp_path / "1", vocab_size=8), "1-b")
    assert [delta.finish async for delta in stream][-1] == "abort"
    with pytest.raises(EngineFault, match="vocabulary of 8"):
        await deltas(engine, GenerateRequest("r", [8], 1, 1))


@pytest.mark.may_block
async def test_bfloat16_weights_come_back_unchanged(tmp_path: Path) -> None:
    engine = TorchEngine(threads=1, dtype="bfloat16")
    await engine.start()
    await engine.refit(saved(tmp_path), "0-a")
    assert await engine.tensor_digests() == file_tensor_digests(tmp_path)
    assert len(tokens_of(await deltas(engine, GenerateRequest("r", [1], 1, 5)))) == 5
    await engine.close()


async def test_a_failing_step_ends_all_samples_until_the_next_refit(
    tmp_path: Path, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(batch: DecodeBatch, tokens: Sequence[int]) -> None:
        raise RuntimeError("out of memory")

    await engine.refit(saved(tmp_path), "0-a")
    with monkeypatch.context() as patch:
        patch.setattr(DecodeBatch, "step", out_of_memory)
        found = await deltas(engine, GenerateRequest("r", [1], 2, 5))
    for sample in range(
        2
    ):  # the first token is of the prefill; a delta brings it alone or with the end
        assert len(tokens_of(found, sample)) == 1
        assert [delta.finish for delta in found if delta.sample == sample][-1] == "abort"
    assert engine.label is None
    await engine.check()
    await engine.refit(tmp_path, "0-a")
    assert len(tokens_of(await deltas(engine, GenerateRequest("r", [1], 1, 5)))) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_no_sample_waits_for_a_dead_decoder(
    tmp_path: Path, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(decoder: Decoder, *arguments: object) -> None:
        raise KeyError("a bug of ours")

    await engine.refit(saved(tmp_path), "0-a")
    monkeypatch.setattr(Decoder, "_step", bug)
    found = await deltas(engine, GenerateRequest("r", [1], 2, 5))
    assert [delta.finish for delta in found] == ["abort"] * 2
    assert engine.label is None
    with pytest.raises(EngineFault):
        await engine.refit(tmp_path, "0-a")


@pytest.mark.parametrize("options", [{"device": "nonsense"}, {"dtype": "int3"}])
def test_an_impossible_engine_is_the_operators_mistake(options: dict[str, Any]) -> None:
    with pytest.raises(OperatorFault, match=next(iter(options.values()))):
        TorchEngine(**options)
