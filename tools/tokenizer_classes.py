"""Writes `echo2d/texts/tokenizer_classes.json`: the parts of a `tokenizer.json` that the tokenizer classes of
`transformers` replace.

    python tools/tokenizer_classes.py [--check]

For many classes, version 5 of `transformers` builds a new tokenizer: with vocabulary, merges and post-processor of the
file, and normalizer, pre-tokenizer and decoder of the class. The base install has no `transformers`, so this file has
those parts, for the classes of models that people train on text; `echo2d/texts/tokenizer_files.py` refuses the
`others`.
"""

import argparse
import inspect
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, processors
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)
from transformers.tokenization_utils_tokenizers import TokenizersBackend

TARGET = Path(__file__).parent.parent / "echo2d" / "texts" / "tokenizer_classes.json"
CLASSES = (
    "CodeGenTokenizer", "CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "GPT2Tokenizer",
    "GPTNeoXTokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer",
)  # fmt: skip
# Settings of a model's folder that change the tokenizer which a class builds.
SETTINGS = ("add_prefix_space", "legacy")
PIPELINE = ("normalizer", "pre_tokenizer", "decoder")


def others() -> list[str]:
    """The names of all other classes that replace parts of a `tokenizer.json`."""
    names = {*filter(None, TOKENIZER_MAPPING_NAMES.values())}
    names |= {name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))}
    plain = {"PreTrainedTokenizerFast", "TokenizersBackend", "AutoTokenizer"}
    return sorted(
        name
        for name in {name.removesuffix("Fast") for name in names - plain}.difference(CLASSES)
        if tokenizer_class_from_name(name) not in (None, TokenizersBackend)
    )


def built(cls: type[Any], settings: dict[str, bool]) -> dict[str, Any]:
    """The tokenizer that the class builds with these settings, without vocabulary and merges."""
    vocab = {"a": 0}
    mark = processors.TemplateProcessing("$A $A", "$A $B", [])
    tokenizer = cls(vocab=vocab, merges=[], post_processor=mark, **settings)
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {key: value for key, value in made["model"].items() if key not in ("vocab", "merges")}
    # None: the class keeps the post-processor of the file. Otherwise the parts around a text, null for the text itself.
    single = made["post_processor"].get("single", [{}])
    kept = len(single) == 2 and all("Sequence" in part for part in single)
    around = None if kept else [part.get("SpecialToken", {}).get("id") for part in single]
    return {**{name: made[name] for name in PIPELINE}, "model": model, "around": around}


def defaults(cls: type[Any]) -> dict[str, str | None]:
    """The special tokens of the class if a folder names none; None: it has no such token, also for padding."""
    found = inspect.signature(cls.__init__).parameters
    named = {name: found[name].default for name in found if name.endswith("_token")}
    return {name: value for name, value in named.items() if not isinstance(value, bool)}


def readds(cls: type[Any]) -> bool:
    """Whether the class adds its special tokens again, without the properties that the folder gives them."""
    mark = AddedToken("</a>", special=True, lstrip=True)
    tokenizer = cls(vocab={"a": 0}, merges=[], eos_token=mark, added_tokens_decoder={1: mark})
    return not any(each.lstrip for each in tokenizer.added_tokens_decoder.values())


def described(cls: type[Any]) -> dict[str, Any]:
    known = inspect.signature(cls.__init__).parameters
    names = [name for name in SETTINGS if name in known]
    usual = built(cls, {})
    others = []
    for values in itertools.product((None, False, True), repeat=len(names)):
        given = {n: v for n, v in zip(names, values, strict=True) if v is not None}
        made = built(cls, given)
        if given and made != usual:
            differs = {key: value for key, value in made.items() if value != usual[key]}
            others.append({"given": given, "then": differs})
    return {
        "tokens": defaults(cls),
        "settings": names,
        "readds": readds(cls),
        **usual,
        "others": others,
    }


def text() -> str:
    found = {
        "transformers": transformers.__version__,
        "of_models": {name: each for name, each in TOKENIZER_MAPPING_NAMES.items() if each},
        "misnamed": sorted(MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "classes": {name: described(tokenizer_class_from_name(name)) for name in CLASSES},
        "others": others(),
    }
    return json.dumps(found, indent=1, ensure_ascii=True, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1: it would differ")
    made = text()
    if parser.parse_args().check:
        return int(made != TARGET.read_text(encoding="utf-8"))
    TARGET.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
