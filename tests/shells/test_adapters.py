"""The base model of an adapter, and the facts in PEFT's layout."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from echo2d.adapters import base_digest, pin_base, pinned_base
from echo2d.engines.adapter import AdapterLayout, adapter_layout
from echo2d.engines.layout import SnapshotLayout, TensorSpec
from echo2d.errors import EngineFault, OperatorFault

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0}
NAMES = ("base_model.model.m.q.lora_A.weight", "base_model.model.m.q.lora_B.weight")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"model.safetensors")
    (folder / "config.json").write_bytes(b"{}")
    return folder


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_the_base_digest_equals_that_of_b3sums_lines(base: Path) -> None:
    lines = [
        f"{blake3((base / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("config.json", "model.safetensors")
    ]
    assert base_digest(base) == blake3("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_every_file_that_shapes_the_weights_changes_the_digest(base: Path, name: str) -> None:
    before = base_digest(base)
    (base / name).write_bytes(b'{"other": 1}')
    assert base_digest(base) != before


def test_neither_other_files_nor_the_place_of_the_files_change_the_digest(
    base: Path, tmp_path: Path
) -> None:
    """Download caches are folders of links, with a model card beside the model."""
    before = base_digest(base)
    (base / "README.md").write_text("a card")
    (base / "x.safetensors").write_bytes(b"a file that nobody reads")
    (tmp_path / "cache").mkdir()
    for path in base.iterdir():
        (tmp_path / "cache" / path.name).symlink_to(path)
    assert base_digest(tmp_path / "cache") == before


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_model_is_no_base(base: Path, missing: str) -> None:
    (base / missing).unlink()
    with pytest.raises(OperatorFault, match=r"no config.json, or no .safetensors"):
        base_digest(base)


def test_a_missing_directory_and_an_adapter_are_refused_as_a_base(base: Path) -> None:
    with pytest.raises(OperatorFault, match="No such file"):
        base_digest(base / "none")
    (base / "adapter_config.json").write_text("{}")
    with pytest.raises(OperatorFault, match="needs a whole model"):
        base_digest(base)


def test_an_adapter_names_its_base_and_a_model_needs_none(base: Path, tmp_path: Path) -> None:
    small = adapter(tmp_path / "small")
    pin_base(small, base_digest(base))
    assert pinned_base(small) == base_digest(base)
    assert pinned_base(base) is None


@pytest.mark.parametrize(
    "pin", [None, "", "{", "[]", "{}", '{"base_digest": 3}', '{"base_digest": "ab"}', " " * 5000]
)
def test_an_adapter_that_does_not_name_its_base_is_refused(tmp_path: Path, pin: str | None) -> None:
    small = adapter(tmp_path / "small")
    if pin is not None:
        (small / "base.json").write_text(pin)
    with pytest.raises(OperatorFault, match=r"base\.json") as caught:
        pinned_base(small)
    assert "\n" not in str(caught.value)


def layout(config: dict[str, Any], names: tuple[str, ...] = NAMES) -> SnapshotLayout:
    return SnapshotLayout(
        {"base": "", "adapter": config},
        {name: TensorSpec("F32", (4, 4)) for name in names},
    )


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (PLAIN, 2.0),
        (PLAIN | {"use_rslora": True}, 8 / math.sqrt(4)),
        (
            PLAIN
            | {
                "lora_dropout": 0.1,
                "target_modules": ["q"],
                "task_type": "CAUSAL_LM",
                "alpha_pattern": {},
            },
            2.0,
        ),
        (
            PLAIN
            | {
                "init_lora_weights": "gaussian",
                "megatron_core": "megatron.core",
                "modules_to_save": None,
            },
            2.0,
        ),
    ],
)
def test_a_plain_adapter_is_accepted(config: dict[str, Any], scale: float) -> None:
    assert adapter_layout(layout(config)) == AdapterLayout(4, scale, {"m.q": (NAMES[0], NAMES[1])})


@pytest.mark.parametrize(
    "change",
    [
        *({"peft_type": "IA3"}, {"bias": "all"}, {"use_dora": True}, {"alpha_pattern": {"q": 3}}),
        *(
            {"rank_pattern": {"q": 3}},
            {"modules_to_save": ["lm_head"]},
            {"init_lora_weights": "pissa"},
        ),
        *(
            {"something_new": 1},
            {"r": 0},
            {"r": "4"},
            {"lora_alpha": None},
            {"lora_alpha": math.nan},
        ),
        *({"lora_alpha": 10**400}, {"lora_alpha": -1.0}),
    ],
)
def test_an_adapter_that_is_not_plain_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EngineFault, match=r"adapter_config\.json"):
        adapter_layout(layout(json.loads(json.dumps(PLAIN | change))))


@pytest.mark.parametrize(
    "names", [NAMES[:1], NAMES[1:], (*NAMES, "lm_head.weight"), (*NAMES, "m.q.lora_magnitude")]
)
def test_an_adapter_has_only_pairs_of_tensors(names: tuple[str, ...]) -> None:
    with pytest.raises(EngineFault, match="adapter tensor"):
        adapter_layout(layout(PLAIN, names))
