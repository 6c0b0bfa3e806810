"""Train with GRPO in plain torch on batches of a coordinator.

python examples/own_loop.py URL TOKEN_FILE BASE_MODEL SNAPSHOT_ROOT STEPS
"""

import copy
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from echo2d.client import Batch, Coordinator, Group, Session

LR, CLIP, STD_FLOOR = 1e-5, 0.2, 1e-4


def too_old(batch: Batch, session: Session) -> dict[int, str]:
    """Return the groups that are too stale to train, with the reason: a trainer checks it again."""
    oldest = batch.step - 1 - session.staleness_max
    return {
        group.group_id: f"version {span.version}"
        for group in batch.groups
        for each in group.trajectories
        for span in each.spans
        if not oldest <= span.version < batch.step
    }


def loss_of(model: Any, group: Group) -> torch.Tensor:
    """Return PPO's clipped loss, summed over written tokens. The workers' logprobs are the old ones."""
    rewards = torch.tensor([each.reward for each in group.trajectories])
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + STD_FLOOR)
    losses = []
    for each, advantage in zip(group.trajectories, advantages, strict=True):
        prompt, answer = (torch.from_numpy(a.copy()).long() for a in (group.prompt, each.tokens))
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logits = logits[each.written].float() / group.sampling.temperature
        logprobs = logits.log_softmax(-1).gather(1, answer[each.written, None])[:, 0]
        ratio = (logprobs - torch.from_numpy(each.logprobs[each.written])).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses.append(-torch.minimum(ratio * advantage, clipped * advantage).sum())
    return torch.stack(losses).sum()


def publish(coordinator: Coordinator, model: Any, base: Path, root: Path, version: int) -> None:
    """Publish the weights as bf16, with the other files of the base model."""
    folder = root / f"own-{version}"
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    coordinator.publish(version, folder)  # when it returns, the coordinator has its own copy
    shutil.rmtree(folder)


def main(url: str, token_file: str, base: str, root: str, steps: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with Coordinator(url, token_file=Path(token_file)) as coordinator:
        session, published = coordinator.open_session(resume_step=0), 0
        publish(coordinator, model, Path(base), Path(root), 0)
        for step in range(1, int(steps) + 1):
            while reasons := too_old(batch := coordinator.take_batch(step), session):
                coordinator.refuse(batch, reasons)
            start = time.monotonic()
            tokens = sum(a.written.sum() for group in batch.groups for a in group.trajectories)
            for group in batch.groups:
                torch.autograd.backward(loss_of(model, group) / tokens)
            optimizer.step()
            optimizer.zero_grad()
            every = coordinator.commit(batch, t_train_s=time.monotonic() - start)
            if step - published >= every or step == int(steps):
                publish(coordinator, model, Path(base), Path(root), published := step)


if __name__ == "__main__":
    main(*sys.argv[1:])
