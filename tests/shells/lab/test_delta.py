"""`echo2d bench delta`: its report, the version that it rebuilds, its refusals, and the encodings of other projects."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner

from echo2d import native
from echo2d.cli import main
from echo2d_lab.bench.delta.baselines import RIVALS
from echo2d_lab.research.delta_table import line, misses
from tests.support.snapshots import write_snapshot

CHANGED = 0.02


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of which every 50th word of the weights differs by one, and a text file."""
    folder = tmp_path_factory.mktemp("versions")
    old = write_snapshot(folder / "old", weight_bytes=1 << 18)
    new = folder / "new"
    shutil.copytree(old, new)
    for path in new.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        words = np.frombuffer(data, "<u2", count=1 << 16, offset=len(data) - (1 << 17))
        words[:: round(1 / CHANGED)] += np.uint16(1)
        path.write_bytes(data)
    (new / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "and": "more"}')
    return old, new


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", "delta", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_bench_reports_the_bytes_of_a_version_and_rebuilds_it(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    against = "xor,index-value,zstd"
    code, output = run(
        *versions, "--runs", 2, "--against", against, "--out", tmp_path / "again", "--json"
    )
    facts = json.loads(output)
    assert (code, facts["roundtrip_ok"]) == (0, True)
    assert facts["changed_fraction"] == pytest.approx(CHANGED, rel=0.02)
    assert facts["wire_fraction"] * facts["ratio"] == pytest.approx(1)
    assert facts["wire_bytes"] < 0.02 * facts["snapshot_bytes"]
    assert facts["chunks"] == {
        "same": 4, "raw": 1, "full": 0, "sparse": 2, "dense": 0, "split": 0,
    }  # fmt: skip
    assert facts["codec"] == native.codec()
    assert list(facts["against"]) == against.split(",")
    assert facts["against"]["zstd"]["wire_fraction"] > 0.5
    for name in (
        "encode_mb_s", "decode_mb_s", "receive_mb_s", "memcpy_mb_s", "encode_per_memcpy", "decode_two_threads",
    ):  # fmt: skip
        low, high = facts["least_most"][name]
        assert 0 < low <= facts[name] <= high
    assert 0 < facts["peak_scratch_mb"] < 2
    for path in filter(Path.is_file, versions[1].rglob("*")):
        assert (
            tmp_path / "again" / path.relative_to(versions[1])
        ).read_bytes() == path.read_bytes()
    assert "2.0" in line("1e-6", facts)
    assert misses("1e-4", {**facts, "roundtrip_ok": False}) != []


def test_the_bench_prints_a_table(versions: tuple[Path, Path]) -> None:
    code, output = run(*versions, "--runs", 1, "--codec", "numpy")
    assert code == 0
    assert "2 sparse" in output
    assert "numpy" in output
    assert "built again byte for byte" in output


def test_an_operators_mistake_is_reported_in_one_line(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_snapshot(tmp_path / "other", weight_bytes=1 << 17)
    old, new = versions
    for arguments in (
        (old, tmp_path),
        (tmp_path / "nothing", new),
        (old, other),
        (old, new, "--against", "lzma"),
        (old, new, "--runs", "0"),
        (old, new, "--out", other),
    ):
        code, output = run(*arguments)
        assert (code, output.count("\n"), output[:8]) == (2, 1, "echo2d: "), output


def test_the_encodings_of_other_projects_carry_every_change() -> None:
    """They can be read back, so what they take is comparable."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 1 << 17, dtype=np.uint16)
    new = base.copy()
    new[[5, 6, 70_000, 131_071]] += np.uint16(3)
    sides = new.tobytes(), base.tobytes()
    xor, listed, alone = (
        zstandard.decompress(RIVALS[name](*sides)) for name in ("xor", "index-value", "zstd")
    )
    assert (np.frombuffer(xor, "<u2") ^ base).tobytes() == sides[0]
    assert np.frombuffer(listed[:16], "<u4").tolist() == [5, 0, 69_993, 61_070]
    assert listed[16:] == new[[5, 6, 70_000, 131_071]].tobytes()
    assert alone == sides[0]
