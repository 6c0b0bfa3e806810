"""Finds the files with the weights in a model's directory, as `transformers` does, and checks them. All functions
block.

    the file that config.json names in `transformers_weights` | model.safetensors | the files of its index

The directory may have other files of weights: shards of an older revision, a copy in another format, an average of
weights. They are not read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2d.core.weights.safetensors_header import LENGTH_BYTES, check_header, header_bytes
from echo2d.errors import IntegrityFault, OperatorFault, path_fault

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained({0!r}, dtype='auto').save_pretrained({0!r})\""
)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of weights in a model's directory."""

    read: tuple[Path, ...]  # the files that hold the model's weights, sorted
    index: Path | None  # the index that names these files; None: there is no index
    ignored: tuple[Path, ...]  # other files with weights, which are not read
    told: bool = False  # whether config.json names the file or the index

    @property
    def named(self) -> bool:
        """Whether `transformers` finds the files; if not, `read` has all files with weights."""
        return self.index is not None or [path.name for path in self.read] == [SINGLE] or self.told

    @property
    def unread(self) -> str:
        """A sentence about the ignored files; empty: no file is ignored."""
        names = ", ".join(path.name for path in self.ignored)
        reason = (
            f"{self.read[0].name} has the weights"
            if self.index is None
            else f"{self.index.name} does not name them"
        )
        return names and f"not read, because {reason}: {names}"


def weight_files(directory: Path) -> WeightFiles:
    """The files with the weights. If `transformers` finds none, for example in an adapter's directory, all are read.

    OperatorFault: the directory or its index cannot be read, or a file that the index names is missing.
    """
    try:
        found = sorted(path for path in directory.iterdir() if path.name.endswith(_SUFFIX))
    except OSError as error:
        raise path_fault(f"{directory} cannot be read", error) from error
    named = str(_object(directory / "config.json").get("transformers_weights") or "")
    index = None
    if named.endswith(_INDEX_SUFFIX):
        index = directory / named
    elif not named and (directory / SINGLE) not in found and (directory / INDEX).exists():
        index = directory / INDEX
    if index is not None:
        shards = _object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise OperatorFault(f"{index} has no weight_map; expected the file of each weight")
        read = tuple(sorted(directory / str(name) for name in {*shards.values()}))
    else:
        single = directory / (named or SINGLE)
        read = (single,) if named or single in found else tuple(found)
    if missing := [path.name for path in read if path not in found]:
        by = "config.json" if index is None else index.name
        raise OperatorFault(f"{directory} lacks {missing[0]}, which {by} names; download it again")
    ignored = tuple(path for path in found if path not in read)
    return WeightFiles(read, index, ignored, bool(named))


def require_model(directory: Path, *, trains: bool = True) -> None:
    """Check config.json, tokenizer.json and the headers of the weights. The weights may be missing on this host.

    OperatorFault: no program can load this model, or `trains` is set and our learner cannot train it.
    """
    if not (directory / "config.json").exists():
        raise OperatorFault(_no_model(directory))
    config = _object(directory / "config.json")
    if config.get("is_encoder_decoder"):
        raise OperatorFault(
            f"{directory} is an encoder-decoder ({config.get('model_type')}); expected a causal language model"
        )
    if trains and (quantized := config.get("quantization_config")) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise OperatorFault(
            f"{directory} is quantized ({method}); convert it to bfloat16 before training, or take the model "
            "that it was made from"
        )
    # This import stands here because the client does not need it.
    from echo2d.core.base.model_config import vocab_size

    _check_vocabulary(_object(directory / "tokenizer.json"), vocab_size(config))
    if any(directory.glob(f"*{_SUFFIX}")):
        for path in weight_files(directory).read:
            _check_weights(path, trains=trains)
    elif other := next(directory.glob("pytorch_model*.bin"), None):
        raise OperatorFault(
            f"{directory} has {other.name}, and no *{_SUFFIX}; convert it once: "
            f"{_CONVERT.format(str(directory))}"
        )


def loading_error(error: Exception) -> str:
    """What transformers says about a directory that it cannot load, without the lists and hints of its message."""
    said = " ".join(str(error).split())
    if said.startswith("Unrecognized configuration class"):
        return "its config.json does not describe a causal language model"
    if "ignore_mismatched_sizes" in said:
        return "the shapes of its weights do not agree with its config.json"
    return said.partition(" This could be because")[0][:200]


def _no_model(directory: Path) -> str:
    """Says why a path without config.json is no model, and what to use instead."""
    if directory.suffix == ".gguf" or any(directory.glob("*.gguf")):
        return f"{directory} is GGUF, which cannot be trained; use the model from which it was made"
    if not directory.is_dir():
        return (
            f"there is no directory {directory}; expected the directory of a model; to download one from the Hugging "
            f"Face hub, type: hf download OWNER/NAME --local-dir {directory}"
        )
    if base := _object(directory / "adapter_config.json").get("base_model_name_or_path"):
        return (
            f"{directory} is a LoRA adapter of {base}; use that model, or merge it into that model"
        )
    inner = [*directory.glob("*/config.json"), *directory.glob("snapshots/*/config.json")]
    meant = f"did you mean {min(inner).parent}?" if inner else "expected the directory of a model"
    return f"{directory} has no config.json; {meant}"


def _check_vocabulary(tokenizer: dict[str, Any], size: int | None) -> None:
    """OperatorFault: the tokenizer has tokens beyond the model's vocabulary. Added tokens are not checked."""
    match tokenizer:
        case {"model": {"vocab": dict(vocab)}}:
            ids = {*vocab.values()}
        case {"model": {"vocab": list(vocab)}}:
            ids = {*range(len(vocab))}
        case _:
            return
    added = {each["id"] for each in tokenizer.get("added_tokens") or ()}
    if size is not None and max(ids - added, default=0) >= size:
        raise OperatorFault(
            f"its tokenizer has {len(ids | added):,} tokens, its config.json says vocab_size = {size}"
        )


def _check_weights(path: Path, *, trains: bool) -> None:
    """OperatorFault: the file is not whole, or `trains` is set and it has integer weights."""
    try:
        with path.open("rb") as file:
            start, size = file.read(len(_LFS_POINTER)), path.stat().st_size
            _refuse_pointer(path, start)
            file.seek(0)
            header = file.read(header_bytes(start, size))
        check_header(header, size)
    except OSError as error:
        raise path_fault(f"{path} cannot be read", error) from error
    except IntegrityFault as fault:
        raise OperatorFault(f"{path} is cut off or damaged ({fault}); download it again") from fault
    for name, tensor in json.loads(header[LENGTH_BYTES:]).items():
        # Only names that end in .weight are checked, because valid models have integer buffers of masks and positions.
        if trains and name.endswith(".weight") and not tensor["dtype"].startswith(("F", "BF")):
            raise OperatorFault(
                f"{path}: {name} has the dtype {tensor['dtype']}; expected BF16, F16 or F32, as before it was quantized"
            )


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(_LFS_POINTER):
        raise OperatorFault(
            f"{path} is a pointer of git-lfs, not the file itself; type git lfs pull in its folder, or download it"
        )


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty: there is no such file."""
    try:
        content = path.read_bytes()
        found = json.loads(content)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise path_fault(f"{path} cannot be read", error) from error
    except ValueError as error:
        _refuse_pointer(path, content)
        raise OperatorFault(f"{path} holds no JSON: {error}; download it again") from error
    return found if isinstance(found, dict) else {}
