"""Prompts equal those of `transformers` for the same folder: 80 odd folders, and 12 conversations."""

import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo2d.errors import OperatorFault
from echo2d.texts.chat_template import compiled, render
from echo2d.texts.files import read_text_files
from echo2d.texts.model_texts import ModelTexts, UnusableText
from tests.support.odd_tokenizers import ODDITIES, conversations, draw
from tests.support.paths import REPO

transformers = pytest.importorskip("transformers")

SEEDS, QUICK = range(80), len(ODDITIES)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Löoks.", "parameters": {"type": "object"}},
    }
]


def tried(make: Callable[..., Any], *words: Any, **options: Any) -> Any:
    """What it makes; None: it cannot."""
    try:
        return make(*words, **options)
    # The library raises plain `Exception`, and a template whatever it likes.
    except Exception:  # noqa: BLE001
        return None


@pytest.mark.parametrize(
    "seed",
    [*SEEDS[:QUICK], *(pytest.param(each, marks=pytest.mark.nightly) for each in SEEDS[QUICK:])],
)
def test_prompts_equal_those_of_transformers(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed, tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    try:
        ours = ModelTexts(read_text_files(tmp_path))
    except OperatorFault as fault:
        pytest.skip(f"{drawn}: refused: {fault}")
    for messages in conversations(random.Random(seed)):
        for options in ({}, {"tools": TOOLS}):
            expected = tried(
                reference.apply_chat_template,
                messages,
                add_generation_prompt=True,
                tokenize=False,
                **options,
            )
            assert tried(ours.render, messages, options) == expected, (drawn, messages)
            for special in (False, True) if expected is not None else ():
                ids = tried(reference.encode, expected, add_special_tokens=special)
                assert tried(ours.encode, expected, special=special) == ids, drawn


def test_few_folders_are_refused(tmp_path: Path) -> None:
    refused = []
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        draw(seed, folder)
        try:
            ModelTexts(read_text_files(folder))
        except OperatorFault as fault:
            refused.append((seed, str(fault)))
    assert len(refused) <= 4, refused


def test_the_table_of_classes_equals_that_of_the_installed_transformers() -> None:
    """Otherwise: `python tools/tokenizer_classes.py`, and look at what has changed."""
    from tools.tokenizer_classes import TARGET, text

    assert TARGET.read_text() == text()


def installed_templates() -> list[Path]:
    """The chat templates of all packages that are installed here, or in the environments of `make nightly`."""
    roots = [Path(sysconfig.get_path("purelib")), *REPO.glob(".cache/*/venv/lib/*/site-packages")]
    found = (path for root in roots for path in sorted(root.glob("**/*.jinja")))
    return [path for path in found if "messages" in path.read_text(errors="replace")]


def test_installed_templates_render_as_in_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    for path in installed_templates():
        text = path.read_text()
        for messages in conversations(random.Random(1)):
            said = [{k: v for k, v in one.items() if v is not None} for one in messages]
            for tools in (None, TOOLS):
                expected = tried(
                    render_jinja_template,
                    [said],
                    tools=tools,
                    chat_template=text,
                    add_generation_prompt=True,
                    **named,
                )
                made = tried(compiled, text, "")
                ours = made and tried(render, made, messages, {"tools": tools}, named)
                assert ours == (expected and expected[0][0]), path.name


@pytest.mark.parametrize("text", ["{% generation %}", "{{ messages | tojson(indent=(1) }}"])
def test_a_malformed_template_is_reported(text: str, tmp_path: Path) -> None:
    draw(0, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(UnusableText, match="the chat template says: "):
        ModelTexts(read_text_files(tmp_path)).render([{"role": "user", "content": "x"}], {})
