"""Trained tokens are those of the engine, even if their text would be tokenized otherwise.

The tokenizer merges "11" and "22", but the model writes digit by digit. So an answer that was converted to text and
back would have other tokens, which do not belong to the recorded logprobs.
"""

import asyncio
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from echo2d.client import AsyncCoordinator, Batch
from echo2d.tasks.sort_digits import EOS, PAD, VOCABULARY
from tests.support.programs import Site
from tests.support.scripted_coordinator import answer_logprobs

pytestmark = [pytest.mark.timeout(900)]

ANSWERS = 500
PER_STEP = 32
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}>"
# Pairs of digits that the tokenizer merges, and tokens that stand for them.
MERGED = {"11": VOCABULARY.index("<"), "22": VOCABULARY.index("+")}


def merging_tokenizer() -> Tokenizer:
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    for pair, token in MERGED.items():
        del ids[VOCABULARY[token]]
        ids[pair] = token
    made = Tokenizer(models.BPE(ids, [(pair[0], pair[1]) for pair in MERGED]))
    made.pre_tokenizer = pre_tokenizers.Split("=", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([VOCABULARY[PAD], VOCABULARY[EOS]])
    return made


def configure(site: Site, tokenizer: Tokenizer) -> Path:
    model = site.directory / "model"
    shutil.copytree(str(site.facts["model"]), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(model / "tokenizer.json"))
    rng = random.Random(0)
    questions = ["".join(rng.choices("0123456789", k=8)) for _ in range(400)]
    rows = [{"prompt": each, "answer": "".join(sorted(each))} for each in questions]
    (site.directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = site.config.read_text()
    for old, new in (
        ('kind = "sort_digits"', 'kind = "rows"'),
        ("options = { rng_seed = 0 }", f'options = {{ files = "{site.directory}/*.jsonl" }}'),
        ("filter_zero_variance = true", "filter_zero_variance = false"),
        (str(site.facts["model"]), str(model)),
    ):
        text = text.replace(old, new)
    site.config.write_text(text)
    return model


async def take(site: Site, model: Path) -> list[Batch]:
    """Batches with ANSWERS answers of version 0, published again for every step."""
    token = site.run_dir / "tokens" / "learner.token"
    batches: list[Batch] = []
    async with AsyncCoordinator(site.url(), token_file=token) as coordinator:
        await coordinator.open_session(0)
        await coordinator.publish(0, publishable(site, model, 0))
        while sum(map(answers_in, batches)) < ANSWERS:
            batch = await coordinator.take_batch(len(batches) + 1)
            batches.append(batch)
            await coordinator.commit(batch, t_train_s=0.1)
            await coordinator.publish(batch.step, publishable(site, model, batch.step))
    return batches


def publishable(site: Site, model: Path, version: int) -> Path:
    return Path(shutil.copytree(model, site.directory / "snapshots" / str(version)))


def answers_in(batch: Batch) -> int:
    return sum(len(group.trajectories) for group in batch.groups)


def test_500_answers_are_trained_with_the_engines_own_tokens(site: Site) -> None:
    tokenizer = merging_tokenizer()
    model = configure(site, tokenizer)
    site.coordinate()
    site.join("box", "--threads=1")
    batches = asyncio.run(take(site, model))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    checked = trapped = 0
    for group in (group for batch in batches for group in batch.groups):
        for answer in group.trajectories:
            tokens = np.concatenate([group.prompt, answer.tokens])[None].astype(np.int64)
            counts = np.arange(tokens.shape[1])[None] >= len(group.prompt)
            found = answer_logprobs(policy, tokens, counts, group.sampling.temperature)
            np.testing.assert_allclose(found.detach().numpy(), answer.logprobs, atol=1e-4)
            written = answer.tokens.tolist()
            text = tokenizer.decode(written, skip_special_tokens=False)
            back = tokenizer.encode(text, add_special_tokens=False).ids
            checked, trapped = checked + 1, trapped + (back != written)
    assert checked >= ANSWERS
    # The trap works: a naive run would have trained on other tokens in many of them.
    assert trapped > ANSWERS // 20, trapped
    print(f"{checked} answers, {trapped} of them read otherwise through text")  # noqa: T201
