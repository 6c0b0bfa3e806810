"""The engine keeps its contract with real servers."""

from pathlib import Path

import pytest

from echo2d.engines.sglang.serving import Running
from tests.loopback.engine_contract import EngineContract
from tests.loopback.engine_harness import Harness
from tests.loopback.sglang_harness import SglangHarness


class TestSglangEngine(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path, servers: list[Running]) -> Harness:
        return SglangHarness(tmp_path, servers)
