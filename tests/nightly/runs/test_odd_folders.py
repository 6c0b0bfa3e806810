"""Closed loops whose model directory is in the state in which a download or its last user left it."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.odd_models import stale_shards, tied_other
from tests.support.polling import START_S, poll
from tests.support.programs import Site, run
from tests.support.rows_site import ask_rows

pytestmark = [pytest.mark.timeout(900)]

STEPS = 2


def cut_and_padded(folder: Path) -> None:
    """The tokenizer as its last user saved it, who read four tokens of every text."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer["padding"] = {
        "strategy": {"Fixed": 4},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<eos>",
    }
    path.write_text(json.dumps(tokenizer))


def test_prompts_are_whole_and_stale_shards_stay_out(site: Site) -> None:
    ask_rows(site, "")
    model = Path(str(site.facts["model"]))
    cut_and_padded(model)
    stale_shards(model, random.Random(0))
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    site.coordinate()
    site.join("box", "--threads=1")
    learner = site.learn(STEPS)
    assert learner.wait(3 * START_S) == 0, learner.tail()
    poll(lambda: site.serving() == STEPS)
    shown = run("samples", f"--run-dir={site.run_dir}", "--json", "--count=40").splitlines()
    prompts = [json.loads(line)["prompt"] for line in shown]
    assert prompts
    assert all(len(prompt) == 9 and prompt.endswith(">") for prompt in prompts)
    first = next((site.run_dir / "versions").glob("0-*"))
    files = sorted(path.name for path in first.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weights = {name: each for path in files for name, each in load_file(first / path).items()}
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert "model-00001-of-00009.safetensors" in learner.log.read_text()


def test_a_tied_config_with_a_head_of_its_own_is_refused(site: Site) -> None:
    ask_rows(site, "")
    tied_other(Path(str(site.facts["model"])), random.Random(0))
    site.coordinate()
    site.url()
    learner = site.learn(STEPS)
    assert learner.wait(START_S) == 2
    (line,) = [each for each in learner.log.read_text().splitlines() if "lm_head.weight" in each]
    assert "tie_word_embeddings" in line
