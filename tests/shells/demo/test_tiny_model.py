"""The tiny model: a normal model directory, cached, the same every time, with the measured accuracy of generation."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo2d.demo.tiny_model import (
    TinyRecipe,
    accuracies,
    greedy_accuracy,
    held_out_prompts,
    make_tiny_model,
)
from echo2d.tasks.sort_digits import EOS, PAD, SortDigits

QUICK = TinyRecipe(accuracy_stop=0.02, digits_min=4, digits_max=5, batch=64, lr=5e-3)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("models"), QUICK)


def test_the_tiny_model_is_a_normal_model_directory_in_bfloat16(model: Path) -> None:
    assert {path.name for path in model.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert {tensor.dtype for tensor in load_file(model / "model.safetensors").values()} == {
        torch.bfloat16
    }
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    assert tokenizer.decode(tokenizer("31>")["input_ids"]) == "31>"


def test_a_tiny_model_is_cached_and_made_the_same_in_another_folder(
    model: Path, tmp_path: Path
) -> None:
    made = (model / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_model(model.parent, QUICK) == model
    assert (model / "model.safetensors").stat().st_mtime_ns == made
    again = make_tiny_model(tmp_path, QUICK)
    assert again.name == model.name
    assert (again / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [model.name]
    other = make_tiny_model(tmp_path, dataclasses.replace(QUICK, rng_seed=1))
    assert (other / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_greedy_accuracy_is_the_share_that_greedy_generation_gets_right(model: Path) -> None:
    prompts = held_out_prompts(QUICK)
    task = SortDigits(digits_min=4, digits_max=5)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    right = 0.0
    with torch.inference_mode():
        for prompt in prompts[:50]:
            tokens = list(prompt.tokens)
            while tokens[-1] != EOS and len(tokens) < 20:
                tokens.append(int(policy(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            right += task.reward(prompt, tokens[len(prompt.tokens) :])
    assert greedy_accuracy(model, prompts[:50]) == right / 50
    assert right > 0


def test_sampled_accuracy_is_at_least_where_training_stopped(model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    _, sampled = accuracies(policy, held_out_prompts(QUICK))
    assert 0.01 < sampled < 0.9


def test_a_recipe_that_misses_its_accuracy_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no accuracy of 0\.9 in 2 steps"):
        make_tiny_model(tmp_path, TinyRecipe(accuracy_stop=0.9, steps_max=2, batch=8))
    assert not list(tmp_path.iterdir())
