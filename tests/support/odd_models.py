"""Model directories with every oddity that directories in use have, drawn by a seed."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.model_shapes import FAMILIES, saved

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / SINGLE)


def keep(folder: Path, tensors: dict[str, Any], name: str = SINGLE) -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})


def shard(folder: Path, count: int = 3) -> None:
    """Split the weights over this many files, with an index."""
    tensors = tensors_of(folder)
    (folder / SINGLE).unlink()
    weight_map: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        names = sorted(tensors)[number::count]
        keep(folder, {each: tensors[each] for each in names}, name)
        weight_map |= dict.fromkeys(names, name)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def other(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor + 1.0 for name, tensor in tensors.items()}


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _shards(folder: Path, rng: random.Random) -> None:
    shard(folder, rng.randint(2, 4))


def stale_shards(folder: Path, rng: random.Random) -> None:
    """Add shards of an older revision with more files, which remain after a download into the same folder."""
    stale = other(tensors_of(folder))
    shard(folder, 2)
    for number, name in enumerate(sorted(stale)[: rng.randint(3, 5)]):
        keep(folder, {name: stale[name]}, f"model-{number + 1:05d}-of-00009.safetensors")


def _consolidated(folder: Path, rng: random.Random) -> None:
    keep(folder, {"layers.0.attention.wq.weight": torch.ones(3, 3)}, "consolidated.safetensors")


def _copy(folder: Path, rng: random.Random) -> None:
    keep(
        folder,
        other(tensors_of(folder)),
        rng.choice(["zz-ema.safetensors", "model_ema.safetensors", "a.safetensors"]),
    )


def _both(folder: Path, rng: random.Random) -> None:
    """One file, and also shards with an index: the one file counts."""
    tensors = tensors_of(folder)
    keep(folder, other(tensors))
    shard(folder, 2)
    keep(folder, tensors)


def _named(folder: Path, rng: random.Random) -> None:
    """config.json names the file."""
    (folder / SINGLE).rename(folder / "weights-1.safetensors")
    keep(folder, other(load_file(folder / "weights-1.safetensors")))
    set_config(folder, transformers_weights="weights-1.safetensors")


def _inv_freq(folder: Path, rng: random.Random) -> None:
    tensors = tensors_of(folder)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    keep(folder, tensors)


def _no_prefix(folder: Path, rng: random.Random) -> None:
    """Name the tensors as a model without its head does when it is saved."""
    keep(folder, {name.removeprefix("model."): each for name, each in tensors_of(folder).items()})


def _dtype(folder: Path, rng: random.Random) -> None:
    dtype = rng.choice([torch.float16, torch.float32, torch.float64])
    keep(folder, {name: tensor.to(dtype) for name, tensor in tensors_of(folder).items()})


def _tied_equal(folder: Path, rng: random.Random) -> None:
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    keep(folder, tensors)
    set_config(folder, tie_word_embeddings=True)


def tied_other(folder: Path, rng: random.Random) -> None:
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
    keep(folder, tensors)
    set_config(folder, tie_word_embeddings=True)


def _twice(folder: Path, rng: random.Random) -> None:
    """A tensor in two files that both count."""
    shard(folder, 2)
    one, two = sorted(folder.glob("model-*.safetensors"))
    tensors = load_file(two)
    name, tensor = next(iter(load_file(one).items()))
    save_file({**tensors, name: tensor + 1.0}, two, metadata={"format": "pt"})


def _compiled(folder: Path, rng: random.Random) -> None:
    keep(folder, {f"_orig_mod.{name}": tensor for name, tensor in tensors_of(folder).items()})


def _value_head(folder: Path, rng: random.Random) -> None:
    keep(folder, {**tensors_of(folder), "v_head.summary.weight": torch.ones(1, 32)})


def _no_index(folder: Path, rng: random.Random) -> None:
    shard(folder, 2)
    (folder / INDEX).unlink()


def _missing_shard(folder: Path, rng: random.Random) -> None:
    shard(folder, 3)
    rng.choice(sorted(folder.glob("model-*.safetensors"))).unlink()


READ: tuple[Callable[[Path, random.Random], None], ...] = (
    _shards, stale_shards, _consolidated, _copy, _both, _named, _inv_freq, _no_prefix, _dtype, _tied_equal,
)  # fmt: skip
# Directories that no program reads correctly, or that transformers reads with another head than the config names.
REFUSED = (tied_other, _twice, _compiled, _value_head, _no_index, _missing_shard)


def draw(
    seed: int, folder: Path, tokenizer: Path, families: Sequence[str] = tuple(FAMILIES)
) -> tuple[str, str, bool]:
    """Write a directory. Returns its family, its oddity, and whether it can be read."""
    rng = random.Random(seed)
    odd = (*READ, *REFUSED)[seed % 16] if seed < 16 else rng.choice(READ)
    family = rng.choice(families)
    if odd in (_no_prefix, _tied_equal, tied_other, _inv_freq, _twice):
        family = rng.choice(["qwen3", "llama"])
    saved(
        folder, family, tokenizer, **({"tie_word_embeddings": False} if odd is tied_other else {})
    )
    odd(folder, rng)
    return family, odd.__name__.strip("_"), odd in READ


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
