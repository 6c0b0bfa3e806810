"""Every engine keeps the contract of `echo2d.engines.base`."""

from pathlib import Path

import pytest

from tests.loopback.engine_contract import EngineContract
from tests.loopback.engine_harness import FakeHarness, Harness, TorchHarness


class TestFakeEngine(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FakeHarness(tmp_path)


class TestTorchEngine(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return TorchHarness(tmp_path)
