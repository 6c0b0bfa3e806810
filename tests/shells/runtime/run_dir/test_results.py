"""Versions of a run are listed and exported from its directory, with and without a coordinator."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.core.base.ids import Epoch, PublishSeq, Version
from echo2d.core.cluster.events import VersionPublished, VersionRevoked
from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.evaluation.events import Evaluated
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.runtime.run_dir.results import choose, export, find_results
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE
from echo2d.runtime.run_dir.version_files import Adopted, VersionFiles
from echo2d.store.ledger import Ledger
from tests.support.snapshots import write_snapshot


class Run:
    """A run directory with versions 0, 5 and 10, of which 5 scored best; its ledger is open."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path / "run", path / "snapshots"
        self.path.mkdir()
        self.source.mkdir()
        self.files = VersionFiles(self.path, self.source)
        self.files.prepare({})
        self.adopted = {version: self._adopt(version) for version in (0, 5, 10)}
        self.ledger = Ledger.open(self.path / LEDGER_FILE)
        self.ledger.append(
            [
                VersionPublished(
                    PublishSeq(seq),
                    Epoch(1),
                    Version(version),
                    each.digest,
                    each.path,
                    each.full_bytes,
                )
                for seq, (version, each) in enumerate(self.adopted.items(), 1)
            ]
        )
        scores = ((0, 0.25, 20), (5, 0.75, 20), (10, 0.9, 19))
        self.ledger.append(
            [self._evaluated(number, *each) for number, each in enumerate(scores, 1)]
        )

    def _adopt(self, version: int) -> Adopted:
        directory = write_snapshot(self.source / str(version), rng_seed=version)
        return self.files.adopt(Epoch(1), Version(version), str(directory))

    def _evaluated(self, number: int, version: int, mean: float, rows: int) -> Evaluated:
        digest = self.adopted[version].digest
        told = (rows, 20, 1, mean, 0.1, (), (RewardPart("form", mean / 2),), 0.0, 9.0, 1.0)
        return Evaluated(number, "math", Version(version), digest, *told)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    with found.ledger:
        yield found


def test_versions_are_listed_with_their_scores(run: Run) -> None:
    found = find_results(run.path)
    assert [(each.version, sorted(each.best)) for each in found] == [
        (0, []),
        (5, ["math"]),
        (10, []),
    ]
    assert choose(found, version=None, best=None).version == 10
    # Version 10 scored higher on fewer questions, which cannot be compared.
    assert choose(found, version=None, best="math").version == 5
    assert choose(found, version=0, best=None).scores["math"].mean == 0.25
    with pytest.raises(OperatorFault, match="version 7 is not kept; there are 0, 5, 10"):
        choose(found, version=7, best=None)
    with pytest.raises(
        OperatorFault, match="best score in 'io' is not kept; expected one of: math"
    ):
        choose(found, version=None, best="io")


def test_a_revoked_version_and_a_version_without_files_are_not_listed(run: Run) -> None:
    run.ledger.append([VersionRevoked(Epoch(2), Version(10), run.adopted[10].digest)])
    run.files.delete(run.adopted[5].path)
    found = find_results(run.path)
    assert [each.version for each in found] == [0]
    with pytest.raises(OperatorFault, match="best score in 'math'"):
        choose(found, version=None, best="math")


def test_an_export_has_the_published_bytes(run: Run, tmp_path: Path) -> None:
    (result,) = (each for each in find_results(run.path) if each.version == 5)
    shares: list[float] = []
    target = tmp_path / "new" / "model"
    export(run.path, result, target, shares.append)
    there = {
        path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()
    }
    source = run.source / "5"
    assert there == {
        path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()
    }
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    with pytest.raises(OperatorFault, match="exists and is not empty"):
        export(run.path, result, target, shares.append)


def test_a_damaged_copy_is_never_exported(run: Run, tmp_path: Path) -> None:
    result = find_results(run.path)[-1]
    weights = next(result.path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    # The source is a hard link to the same file.
    weights.unlink()
    weights.write_bytes(data)
    with pytest.raises(IntegrityFault, match="its bytes are not those of version 10"):
        export(run.path, result, tmp_path / "model", lambda _: None)
    run.files.delete(run.adopted[5].path)
    gone = next(each for each in find_results(run.path) if each.version == 0)
    run.files.delete(run.adopted[0].path)
    with pytest.raises(StoreFault, match="version 0 was deleted meanwhile"):
        export(run.path, gone, tmp_path / "model", lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "snapshots"]


def test_an_export_into_a_forbidden_place_is_refused(run: Run, tmp_path: Path) -> None:
    result = find_results(run.path)[-1]
    inside = run.path / "versions" / "mine"
    with pytest.raises(OperatorFault, match="is inside the run directory"):
        export(run.path, result, inside, lambda _: None)
    # A link to an empty directory is as good as that.
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    export(run.path, result, tmp_path / "link", lambda _: None)
    assert (tmp_path / "empty" / "config.json").exists()


def test_the_export_command_lists_and_exports_versions(run: Run, tmp_path: Path) -> None:
    def echo2d(*arguments: object) -> tuple[int, str]:
        words = ["keep", "export", "--run-dir", str(run.path), *map(str, arguments)]
        ended = CliRunner().invoke(main, words)
        return ended.exit_code, ended.output

    code, told = echo2d()
    assert code == 0
    assert "best math" in told
    assert "last" in told.splitlines()[-1]
    target = tmp_path / "model"
    code, told = echo2d("--best", "math", "--json", target)
    assert (code, json.loads(told)["version"]) == (0, 5)
    assert json.loads(told)["best"] == ["math"]
    assert echo2d("--last", target)[0] == 2
    assert echo2d("--last", "--version", "5", tmp_path / "other")[0] == 2
    assert echo2d("--last")[0] == 2
    code, told = echo2d("--last", tmp_path / "other")
    assert code == 0
    assert "AutoModelForCausalLM.from_pretrained" in told


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OperatorFault, match=r"is not the directory of a run: it has no ledger\.sqlite"
    ):
        find_results(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_scores_are_shown_without_a_coordinator(run: Run) -> None:
    words = ["status", "--scores", f"--run-dir={run.path}"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    title, head, *rows = shown.output.splitlines()
    assert (title.strip(), head.split()) == (
        "math",
        ["version", "score", "form", "cut", "off", "tokens", "questions"],
    )
    assert [row.split()[:4] for row in rows[:2]] == [
        ["0", "0.250", "+-", "0.100"],
        ["5", "0.750", "+-", "0.100"],
    ]
    assert " 0.375 " in rows[1]
    told = CliRunner().invoke(main, [*words, "--json"]).output.splitlines()
    assert [json.loads(line)["parts"] for line in told] == [
        {"form": 0.125},
        {"form": 0.375},
        {"form": 0.45},
    ]
    nowhere = CliRunner().invoke(main, [*words[:2], "--run-dir=nowhere"])
    assert (nowhere.exit_code, nowhere.output.count("\n")) == (2, 1)
    assert "nowhere is not the directory of a run" in nowhere.output
