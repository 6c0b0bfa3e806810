"""Reads the tokenizer of a model's directory as `transformers` 5 reads it, without importing it. Blocking.

`tokenizer.json` is not all of a tokenizer: other files of the directory name its special tokens and add tokens, some
classes replace the file's pipeline by their own (`tokenizer_classes.json`, made by tools/tokenizer_classes.py),
and its settings of truncation and padding, which its last user chose, are dropped. The steps follow
`AutoTokenizer.from_pretrained` of transformers 5.23, for a local directory with a `tokenizer.json`.
Not here: chat templates, and the reading of the files.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from echo2d.errors import OperatorFault
from echo2d.texts.files import ADDED_TOKENS, CLASS_FILE, SETTINGS, SPECIAL_TOKENS, TOKENIZER

_PLAIN = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "MistralCommonBackend")
# Names of special tokens that every tokenizer may have; other names end with `_token` too.
_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

_Token = str | AddedToken


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer and the files that it was made from."""

    tokenizer: Tokenizer  # without truncation and padding
    document: Mapping[str, Any]  # what the tokenizer was made from, in the form of tokenizer.json
    named: Mapping[str, str]  # the text of each special token that has a name, such as bos_token
    settings: Mapping[str, Any]  # tokenizer_config.json
    config: Mapping[str, Any]  # config.json


def load_tokenizer(files: Mapping[str, bytes]) -> LoadedTokenizer:
    """Read a tokenizer. files: the content of TEXT_FILES. OperatorFault: it cannot be read as `transformers` does."""
    try:
        loaded = _load(files)
    # The library may raise any exception on a malformed file, and so may a setting of a wrong type.
    except Exception as error:
        raise OperatorFault(f"the snapshot's tokenizer cannot be read: {error}") from error
    if isinstance(loaded, str):
        raise OperatorFault(f"the snapshot's tokenizer: {loaded}")
    return loaded


def _refusal(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Why this cannot be read here; empty: it can."""
    if "auto_map" in settings:
        return "auto_map names a program that comes with the model, which echo2d does not run"
    if "fast_tokenizer_files" in settings:
        return (
            "fast_tokenizer_files names other files; leave tokenizer.json alone and remove that key"
        )
    if settings.get("fix_mistral_regex") and "mistral" in str(config.get("model_type")):
        return "fix_mistral_regex: save it with the regular expression corrected"
    return ""


def _class_of(settings: Mapping[str, Any], config: Mapping[str, Any], built: bytes) -> str:
    """The class that transformers uses; empty: none that changes what is in the file."""
    known, model = _classes(), config.get("model_type")
    of_model = known["of_models"].get(model, "").removesuffix("Fast")
    own = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = str(own or "").removesuffix("Fast")
    misnamed = model in known["misnamed"] or config.get("model_name") in known["misnamed"]
    # `transformers` makes the same of this class as of a plain file if the file splits into bytes.
    if name == "LlamaTokenizer" and not misnamed and b'"ByteLevel"' in built:
        return ""
    if own and of_model and of_model != name:
        name = "" if of_model in _PLAIN else of_model if misnamed else name
    else:
        name = name or of_model
    return "" if name in _PLAIN else name


def _load(files: Mapping[str, bytes]) -> LoadedTokenizer | str:
    """The tokenizer, or a text that says why it cannot be read here."""
    settings, config = _object(files, SETTINGS), _object(files, CLASS_FILE)
    document = json.loads(files[TOKENIZER])
    document["model"].pop("merges", None)  # only the library reads them
    if fault := _refusal(settings, config):
        return fault
    name = _class_of(settings, config, files[TOKENIZER])
    if name in _classes()["others"]:
        return f"transformers reads it by its class {name}; save it as PreTrainedTokenizerFast"
    cls = _classes()["classes"].get(name)
    args, added = _arguments(files, settings, document)
    if cls is not None:
        args = {**cls["tokens"], **args}
    if document.get("padding") is not None:
        args.setdefault("pad_token", document["padding"]["pad_token"])
    tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
    if cls is not None:
        document, tokenizer = _rebuilt(document, tokenizer, cls, args)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = _named(args)
    _add(tokenizer, added, named, _extra(args))
    tokenizer.encode_special_tokens = bool(args.get("split_special_tokens", False))
    if cls is not None and cls["readds"]:
        again = dict.fromkeys(map(str, [*named.values(), *_extra(args)]))
        tokenizer.add_tokens([AddedToken(text, special=True) for text in again])
    if cls is not None and cls["around"] is not None:
        _put_around(tokenizer, cls["around"])
    texts = {key: str(token) for key, token in named.items()}
    return LoadedTokenizer(tokenizer, document, texts, settings, config)


def _arguments(
    files: Mapping[str, bytes], settings: Mapping[str, Any], document: Mapping[str, Any]
) -> tuple[dict[str, Any], list[AddedToken]]:
    """The settings that a class gets as arguments, and the tokens to add, in their order."""
    # These settings have no effect if there is a tokenizer.json.
    args = {
        key: each
        for key, each in settings.items()
        if key not in ("tokenizer_class", "add_bos_token", "add_eos_token")
    }
    if args.get("additional_special_tokens") and not args.get("extra_special_tokens"):
        args["extra_special_tokens"] = args.pop("additional_special_tokens")
    own = {
        key: args.pop(key)
        for key in list(args)
        if key.endswith("_token") and key not in _NAMES and isinstance(args[key], str)
    }
    if isinstance(args.get("extra_special_tokens"), dict):
        own.update(args.pop("extra_special_tokens"))
    if own:
        args["model_specific_special_tokens"] = own
    added = _added_tokens(files, args, document)
    args = {key: _token(value) for key, value in args.items()}
    by_text = {str(token): token for token in added.values()}
    for key in _NAMES:
        if args.get(key) is not None:
            args[key] = by_text.get(str(args[key]), args[key])
    return args, [added[number] for number in sorted(added)]


def _added_tokens(
    files: Mapping[str, bytes], args: dict[str, Any], built: Mapping[str, Any]
) -> dict[int, AddedToken]:
    """The tokens to add, by their numbers. If `tokenizer_config.json` has any, only those count."""
    if "added_tokens_decoder" in args:
        listed = args.pop("added_tokens_decoder")
        return {int(number): AddedToken(**token) for number, token in listed.items()}
    for key, value in _object(files, SPECIAL_TOKENS).items():
        if isinstance(value, dict) and key != "extra_special_tokens":
            value.pop("special", None)
            args[key] = AddedToken(**value, special=True)
        elif isinstance(value, list) and key == "extra_special_tokens":
            tokens = [
                AddedToken(**each, special=True) if isinstance(each, dict) else each
                for each in value
            ]
            args[key] = list(dict.fromkeys([*(args.get(key) or []), *tokens]))
        else:
            args[key] = value
    if isinstance(args.get("extra_special_tokens"), dict):
        own = args.setdefault("model_specific_special_tokens", {})
        own.update(args.pop("extra_special_tokens"))
    special = {str(args[key]) for key in _NAMES if args.get(key)}
    special.update(map(str, args.get("extra_special_tokens") or ()))
    added = {
        number: AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in _object(files, ADDED_TOKENS).items()
    }
    for each in built["added_tokens"]:
        flags = {key: value for key, value in each.items() if key != "id"}
        added[each["id"]] = AddedToken(**flags)
    return added


def _named(args: Mapping[str, Any]) -> dict[str, _Token]:
    """The special tokens that have names. Those of the model come last, and replace others of the same name."""
    found = {key: args[key] for key in _NAMES if isinstance(args.get(key), str | AddedToken)}
    own = {
        key: value
        for key, value in args.items()
        if key.endswith("_token") and key not in _NAMES and isinstance(value, str | AddedToken)
    }
    return {**found, **own, **(args.get("model_specific_special_tokens") or {})}


def _extra(args: Mapping[str, Any]) -> list[_Token]:
    found = args.get("extra_special_tokens", args.get("additional_special_tokens"))
    return list(found or ())


def _rebuilt(
    document: dict[str, Any],
    tokenizer: Tokenizer,
    cls: Mapping[str, Any],
    args: Mapping[str, Any],
) -> tuple[dict[str, Any], Tokenizer]:
    """The document, whose pipeline is replaced by that of the class, and its tokenizer without added tokens.

    tokenizer: of the file; it must not be used afterwards.
    """
    made = {key: cls[key] for key in ("normalizer", "pre_tokenizer", "decoder", "model")}
    given = {key: args[key] for key in cls["settings"] if args.get(key) is not None}
    for other in cls["others"]:
        if other["given"].items() == given.items():
            made.update(other["then"])
    empty = {**made["model"], "vocab": {}, "merges": []}
    outline = {**document, **made, "model": empty, "added_tokens": []}
    rebuilt = Tokenizer.from_str(json.dumps(outline))
    # Vocabulary and merges are not copied: there may be hundreds of thousands.
    model = tokenizer.model
    for key, value in made["model"].items():
        if key != "type":
            setattr(model, key, value)
    if model.unk_token is not None:
        model.unk_token = str(args["unk_token"])
    rebuilt.model = model
    return {**outline, "model": {**empty, "vocab": document["model"]["vocab"]}}, rebuilt


def _add(
    tokenizer: Tokenizer,
    added: list[AddedToken],
    named: Mapping[str, _Token],
    extra: Iterable[_Token],
) -> None:
    """Add the tokens in this order, and after them the special ones that are not there yet."""
    known = {*(token.content for token in tokenizer.get_added_tokens_decoder().values())}
    known.update(map(str, added))
    tokens: list[_Token] = []
    for token in (*named.values(), *extra):
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    names = {str(token) for token in named.values()}
    made = []
    for token in (*added, *tokens):
        each = token if isinstance(token, AddedToken) else AddedToken(token, special=True)
        if not each.special and str(each) in names:
            each.special = True
        made.append(each)
    tokenizer.add_tokens(made)


def _put_around(tokenizer: Tokenizer, around: Iterable[str | None]) -> None:
    parts = ["$A" if part is None else part for part in around]
    tokens = [(part, tokenizer.token_to_id(part)) for part in dict.fromkeys(parts) if part != "$A"]
    tokenizer.post_processor = TemplateProcessing(" ".join(parts), special_tokens=tokens)


def _token(value: Any) -> Any:
    """The setting, in which objects that mean tokens are replaced by tokens."""
    if isinstance(value, dict) and (value.get("__type") == "AddedToken" or "content" in value):
        return AddedToken(**{key: each for key, each in value.items() if key != "__type"})
    if isinstance(value, list):
        return [_token(each) for each in value]
    return {key: _token(each) for key, each in value.items()} if isinstance(value, dict) else value


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    found = json.loads(files[name]) if name in files else {}
    if not isinstance(found, dict):
        raise TypeError(f"{name} holds no object")
    return found


@cache
def _classes() -> dict[str, Any]:
    text = package_files(__package__).joinpath("tokenizer_classes.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
