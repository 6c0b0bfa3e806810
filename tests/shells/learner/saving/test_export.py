"""Exports of checkpoints have the bytes of a publish, and transformers loads them."""

import dataclasses
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import echo2d.learner.saving.export as exporting
from echo2d.learner.__main__ import main
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.saving.export import WEIGHTS_KEPT, SavedWeights
from tests.support.full_disk import files_up_to
from tests.support.learner import config_in, learn, write_config
from tests.support.lora import OnBase
from tests.support.model_shapes import saved
from tests.support.scripted_coordinator import ScriptedCoordinator

LORA: dict[str, Any] = {"lora_rank": 4, "lora_targets": ("q_proj", "up_proj"), "lr": 1e-2}
TOKENS = torch.tensor([[3, 1, 2, 5, 4, 9]])
CLOSE = 0.03  # of logits: bfloat16 has 8 bits


@pytest.fixture
def trained(config: LearnerConfig, coordinator: ScriptedCoordinator) -> LearnerConfig:
    """The config of a run of four steps; steps 3 and 4 have checkpoints."""
    learn(config, coordinator)
    return config


@pytest.fixture
def adapted(tmp_path: Path, base: Path) -> LearnerConfig:
    """The config of a run of two steps that trained an adapter; its versions are in `taken`."""
    config = config_in(tmp_path, base, steps=2, warmup_steps=0, **LORA)
    learn(config, OnBase(tmp_path / "taken", base))
    return config


def run(config: LearnerConfig, step: str, directory: Path, *options: str, **changes: Any) -> int:
    """The exit code of an export."""
    path = write_config(directory.parent / "run.toml", config, **changes)
    return main(["--config", str(path), "--export", step, str(directory), *options])


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def logits(model: Any) -> torch.Tensor:
    """The logits of this model, in float32."""
    with torch.no_grad():
        found: torch.Tensor = model.float().eval()(TOKENS).logits
    return found


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "family", ["tied", "qwen3", "gemma3 with windows and a soft cap", "qwen3 moe", "gpt-oss"]
)
def test_an_export_has_the_bytes_of_a_publish_of_that_step(
    family: str, config: LearnerConfig, base: Path, tmp_path: Path
) -> None:
    model = base if family == "tied" else saved(tmp_path / "model", family, base)
    config = dataclasses.replace(config, model=model, steps=2)
    coordinator = ScriptedCoordinator(tmp_path / "taken")
    learn(config, coordinator)
    assert run(config, "last", tmp_path / "export") == 0
    assert bytes_of(tmp_path / "export") == bytes_of(coordinator.published(2))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(load_model(tmp_path / "export")))


def test_the_log_says_how_far_an_export_is_without_a_terminal(
    trained: LearnerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(exporting, "_LINE_S", 0.0)
    assert run(trained, "last", tmp_path / "export") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert all(" exporting 0.0/0.0 GB" in line for line in lines)


def test_the_policy_of_a_checkpoint_and_its_export_have_close_logits(
    trained: LearnerConfig, tmp_path: Path
) -> None:
    assert run(trained, "last", tmp_path / "export") == 0
    policy = load_model(trained.model)
    (newest,) = (trained.out_dir / "checkpoints").glob("step-00000004-*")
    weights = SavedWeights(newest)
    policy.load_state_dict({name: weights.read(name, torch.float32) for name in weights.shapes})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits(loaded), logits(policy), rtol=CLOSE, atol=CLOSE)


def test_an_adapter_is_exported_as_it_is_published(adapted: LearnerConfig, tmp_path: Path) -> None:
    assert run(adapted, "2", tmp_path / "export") == 0
    taken = tmp_path / "taken"
    assert bytes_of(tmp_path / "export") in [bytes_of(path) for path in taken.iterdir()]


def test_a_merged_adapter_is_exported_as_a_whole_model(
    adapted: LearnerConfig, base: Path, tmp_path: Path
) -> None:
    assert run(adapted, "2", tmp_path / "merged", "--merge") == 0
    assert run(adapted, "2", tmp_path / "adapter") == 0
    assert bytes_of(tmp_path / "merged").keys() == bytes_of(base).keys()
    old, new = (load_file(path / "model.safetensors") for path in (base, tmp_path / "merged"))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {name for name in old if name.split(".")[-2] in LORA["lora_targets"]}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = logits(hooked(load_model(base), tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded), expected, rtol=CLOSE, atol=CLOSE)
    assert not torch.allclose(expected, logits(load_model(base)), rtol=CLOSE, atol=CLOSE)


def test_a_merge_rounds_once_and_does_not_change_experts(base: Path, tmp_path: Path) -> None:
    """The base is in float32, so that it is rounded too."""
    model = saved(tmp_path / "model", "qwen3 moe", base)
    whole = {name: tensor.float() * 1.001 for name, tensor in load_file(path_of(model)).items()}
    save_file(whole, path_of(model), {"format": "pt"})
    changes = {**LORA, "lora_targets": ("q_proj",)}
    config = config_in(tmp_path, model, steps=1, warmup_steps=0, **changes)
    learn(config, OnBase(tmp_path / "taken", model))
    assert run(config, "1", tmp_path / "merged", "--merge") == 0
    (checkpoint,) = (config.out_dir / "checkpoints").iterdir()
    weights = SavedWeights(checkpoint)
    for name, tensor in load_file(path_of(tmp_path / "merged")).items():
        expected, layer = whole[name], name.removesuffix(".weight")
        if layer.endswith(".q_proj"):
            first, second = (
                weights.read(f"{layer}.lora_{each}.weight", torch.float32) for each in "AB"
            )
            assert second.count_nonzero()
            expected = expected + config.lora_alpha / config.lora_rank * (second @ first)
        assert torch.equal(tensor, expected.bfloat16()), name


def path_of(model: Path) -> Path:
    return model / "model.safetensors"


def hooked(model: Any, adapter: Path) -> Any:
    """The model with B (A x) * alpha / r added to the output of each layer, as PEFT does."""
    facts = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_A." in name]:
        layer = model.get_submodule(name.removeprefix("base_model.model.").split(".lora_A.")[0])
        first, second = (tensors[name.replace("_A", each)].float() for each in ("_A", "_B"))
        scale = facts["lora_alpha"] / facts["r"]

        def add(
            _: Any, inputs: Any, output: Any, a: Any = first, b: Any = second, s: float = scale
        ) -> Any:
            return output + inputs[0] @ a.T @ b.T * s

        layer.register_forward_hook(add)
    return model


def test_a_line_or_a_json_object_says_what_was_exported(
    trained: LearnerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    assert run(trained, "3", first) == 0
    size = sum(map(len, bytes_of(first).values()))
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out == (
        f"wrote the model of step 3 (epoch 1, run run) to {first}: {size:,} bytes; load it with "
        f"AutoModelForCausalLM.from_pretrained('{first}') or "
        f"python -m sglang.launch_server --model-path {first}\n"
    )
    assert run(trained, "last", second, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["step"], found["epoch"]) == ("model", 4, 1)
    assert (found["directory"], found["bytes"]) == (str(second), size)


def test_a_step_that_two_epochs_saved_is_exported_from_the_higher_one(
    trained: LearnerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = trained.out_dir / "checkpoints"
    shutil.copytree(checkpoints / "step-00000003-epoch-1", checkpoints / "step-00000003-epoch-12")
    assert run(trained, "3", tmp_path / "export", "--json") == 0
    assert json.loads(capsys.readouterr().out)["epoch"] == 12


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ("5", "/checkpoints has no checkpoint of step 5; it has those of steps 3, 4"),
        ("newest", "--export: expected the number of a step, or last; found 'newest'"),
        ("-1", "--export: expected the number of a step, or last; found '-1'"),
    ],
)
def test_a_step_without_a_checkpoint_is_refused(
    trained: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: str,
    line: str,
) -> None:
    assert run(trained, step, tmp_path / "export") == 2
    assert last_line(capsys).endswith(line)
    assert not (tmp_path / "export").exists()


def test_a_run_without_checkpoints_has_nothing_to_export(
    config: LearnerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, "last", tmp_path / "export") == 2
    assert last_line(capsys) == f"learner: {config.out_dir}/checkpoints has no checkpoints"


def test_a_damaged_checkpoint_is_refused(
    trained: LearnerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (trained.out_dir / "checkpoints").glob("step-00000004-*/__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert run(trained, "last", tmp_path / "export") == 2
    expected = f"cannot read the checkpoint {path.parent}: its bytes are not those that were saved"
    assert last_line(capsys) == f"learner: {expected}"
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    "fill", [lambda path: path.write_text("x"), lambda path: (path / "x").mkdir(parents=True)]
)
def test_a_directory_that_is_not_empty_is_left_alone(
    trained: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fill: Callable[[Path], object],
) -> None:
    fill(tmp_path / "export")
    assert run(trained, "last", tmp_path / "export") == 2
    assert last_line(capsys) == (
        "learner: --export: expected a directory that is empty or does not exist; "
        f"found {tmp_path}/export. Name another one"
    )
    assert (tmp_path / "export").is_file() or (tmp_path / "export" / "x").is_dir()


@pytest.mark.parametrize(
    ("changes", "options", "line"),
    [
        (
            {},
            ["--merge"],
            "--merge: expected an adapter to merge; learner.lora_rank is 0",
        ),
        ({"lora_rank": 4}, [], "it has other trained weights; use the config of its run"),
    ],
)
def test_an_export_of_what_the_checkpoint_lacks_is_refused(
    trained: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    options: list[str],
    line: str,
) -> None:
    assert run(trained, "last", tmp_path / "export", *options, **changes) == 2
    assert last_line(capsys).endswith(line)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("options", [[], ["--merge"]])
def test_an_adapter_of_another_base_is_refused(
    adapted: LearnerConfig,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    (other / "generation_config.json").write_text("{}")
    changed = dataclasses.replace(adapted, model=other)
    assert run(changed, "2", tmp_path / "export", *options) == 2
    assert last_line(capsys).endswith("belongs to another base model")


@pytest.mark.parametrize("options", [[], ["--merge"]])
def test_an_adapter_of_another_scale_is_refused(
    adapted: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    changed = dataclasses.replace(adapted, lora_alpha=adapted.lora_alpha * 8)
    assert run(changed, "2", tmp_path / "export", *options) == 2
    assert last_line(capsys).endswith("the adapter was trained with 16; found 128")


def test_a_full_disk_leaves_nothing_of_an_export(
    trained: LearnerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_up_to(100_000):
        assert run(trained, "last", tmp_path / "export") == 1
    assert f"cannot write the snapshot {tmp_path}/export: File too large" in last_line(capsys)
    assert not list(tmp_path.glob("*export*"))


def test_a_checkpoint_that_is_removed_meanwhile_leaves_nothing_of_an_export(
    trained: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learner that still runs deletes its old checkpoints."""
    read = SavedWeights.read

    def late(self: SavedWeights, name: str, dtype: torch.dtype) -> torch.Tensor:
        shutil.rmtree(trained.out_dir / "checkpoints", ignore_errors=True)
        return read(self, name, dtype)

    monkeypatch.setattr(SavedWeights, "read", late)
    assert run(trained, "4", tmp_path / "export") == 1
    gone = trained.out_dir / "checkpoints" / "step-00000004-epoch-1"
    expected = f"learner: cannot read the checkpoint {gone}: No such file or directory"
    assert last_line(capsys) == expected
    assert not list(tmp_path.glob("*export*"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--merge"], "--merge needs --export"),
        (["--ranks", "2"], "--ranks needs --plan"),
        (["--gpu-gib", "80"], "--gpu-gib needs --plan"),
        (["--json"], "--json needs --plan or --export"),
        (["--resum"], "unrecognized arguments: --resum"),
    ],
)
def test_an_option_that_would_be_ignored_starts_no_run(
    config: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    typed: list[str],
    said: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(write_config(tmp_path / "run.toml", config)), *typed])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"learner: {said}; see ")


def test_the_exporting_process_never_holds_the_whole_model(
    config: LearnerConfig, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few weights live at a time, and each weight of experts is read about once."""
    model = saved(tmp_path / "model", "qwen3 moe", base)
    config = dataclasses.replace(config, model=model, steps=1)
    learn(config, ScriptedCoordinator(tmp_path / "taken"))
    living: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, names, read = [0], list[str](), SavedWeights.read

    def counted(self: SavedWeights, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = read(self, name, dtype)
        living.add(weight)
        names.append(name)
        most[0] = max(most[0], len(living))
        return weight

    monkeypatch.setattr(SavedWeights, "read", counted)
    assert run(config, "last", tmp_path / "export") == 0
    # With a full cache, one more weight is being read, and one tensor is being written.
    assert most[0] <= WEIGHTS_KEPT + 2
    assert len(names) == len(set(names)) > 10
