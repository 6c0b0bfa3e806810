"""A worker on the torch engine reads prompts of clients under each version that it holds."""

import asyncio
import shutil
from pathlib import Path

import numpy as np

from echo2d.core.base.ids import Digest, Version, version_label
from echo2d.core.protocol.control_messages import (
    HeldVersions,
    PromptRead,
    ReadPrompt,
    RefitDone,
    VersionKey,
)
from echo2d.engines.fake import FakeEngine
from echo2d.engines.torch_engine import TorchEngine
from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.prompts import PromptCall
from echo2d.tinker.wire import write_prompt_call
from tests.support.engine_contract import PROMPT
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.lora import AdapterHarness
from tests.support.peer import a_seed, a_worker, publish_full

CALL = write_prompt_call(PromptCall(tokens_t=np.array(PROMPT), logprobs=True, last=len(PROMPT) - 1))
LOST = VersionKey(Version(7), Digest(bytes(32)))


async def test_a_prompt_is_read_under_each_held_version(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    harness = await asyncio.to_thread(AdapterHarness, tmp_path / "models")
    base, keys = harness.base.directory, list[VersionKey]()
    worker = a_worker(double, tmp_path / "box", TorchEngine(threads=1), base_model=base)
    async with a_seed(double), worker:
        names = await double.peers(2)
        box = names["box"]
        for version in (0, 1):
            double.send(box, HeldVersions(2, tuple(keys)))
            copy = double.run.path / "versions" / str(version)
            await asyncio.to_thread(shutil.copytree, harness.snapshot(version), copy)
            digest = await publish_full(double, version, names["seed"], box)
            keys.append(VersionKey(Version(version), digest))
            await double.until_said(RefitDone, box, count=version + 1)
        for order, key in enumerate([*keys, LOST]):
            double.send(box, ReadPrompt(order, *key, CALL))
            said = await double.until_said(PromptRead, box, count=order + 1)
            assert said.order == order
            if key == LOST:
                assert (said.scores, said.fault) == (
                    b"",
                    f"version {version_label(*LOST)} is not held",
                )
                continue
            found = np.frombuffer(pb.SampleResult.FromString(said.scores).prompt_logprobs, "<f4")
            right = await asyncio.to_thread(harness.logprobs, order, PROMPT[:1], PROMPT[1:], 1.0)
            np.testing.assert_allclose(found[1:], right, atol=1e-4)


async def test_a_worker_whose_engine_cannot_score_says_so(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_worker(double, tmp_path / "box", FakeEngine()):
        box = (await double.peers(1))["box"]
        double.send(box, ReadPrompt(3, *LOST, CALL))
        said = await double.until_said(PromptRead, box)
        assert said == PromptRead(3, b"", "no engine here can score")
