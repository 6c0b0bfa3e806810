"""Train with TRL's GRPOTrainer on batches of a coordinator.

    python -m examples.trl_grpo URL TOKEN_FILE BASE_MODEL SNAPSHOT_ROOT STEPS

TRL calls `rollout_func` for the answers of a step. It returns the prompts, tokens and logprobs of
the coordinator's batch, which of the tokens were written, and the rewards, which TRL hands to the
reward function. A callback commits each step and publishes versions. TRL's own dataset only says
how many answers a step has.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from echo2d.client import Batch, Coordinator, Session
from examples.own_loop import publish, too_old

LR, MICRO_BATCH = 1e-4, 64


class Feed(TrainerCallback):  # type: ignore[misc]  # TRL has no types
    """Feeds the trainer the batches of a session, in the order of train steps."""

    def __init__(self, coordinator: Coordinator, session: Session, base: Path, root: Path) -> None:
        self._coordinator, self._session, self._base, self._root = coordinator, session, base, root
        self._batch: Batch
        self._taken = 0.0
        self._published = 0

    def rollout(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return all answers of the next step, as TRL asks for them."""
        step = trainer.state.global_step + 1
        while reasons := too_old(batch := self._coordinator.take_batch(step), self._session):
            self._coordinator.refuse(batch, reasons)
        self._batch, self._taken = batch, time.monotonic()
        if any(group.left_out for group in batch.groups):
            raise SystemExit("TRL trains whole groups: set policy.group_min = group_size")
        if any(group.sampling.temperature != 1.0 for group in batch.groups):
            raise SystemExit("this example trains at temperature 1: set sampling.temperature = 1.0")
        answers = [(group.prompt, each) for group in batch.groups for each in group.trajectories]
        assert len(answers) == len(prompts)
        return {
            "prompt_ids": [prompt.tolist() for prompt, _ in answers],
            "completion_ids": [each.tokens.tolist() for _, each in answers],
            "logprobs": [each.logprobs.tolist() for _, each in answers],
            "env_mask": [each.written.astype(int).tolist() for _, each in answers],
            "earned": [each.reward for _, each in answers],
        }

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        step = state.global_step
        every = self._coordinator.commit(self._batch, t_train_s=time.monotonic() - self._taken)
        if step - self._published >= every or step == state.max_steps:
            publish(self._coordinator, model, self._base, self._root, step)
            self._published = step


class StaleGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """Clips against the logprobs of the workers.

    Without vLLM, TRL would take the answers for its own and fresh, and clip nothing.
    """

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return found | {"old_per_token_logps": found["sampling_per_token_logps"]}


def earned_by(earned: list[float], **_: Any) -> list[float]:
    return earned


def config_of(session: Session, out: Path, steps: int) -> GRPOConfig:
    """Return a configuration that takes one optimizer step on each batch of the session."""
    micro = min(MICRO_BATCH, session.trajectories_per_step)
    return GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=session.trajectories_per_step // micro,
        num_generations=session.group_size,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )


def main(url: str, token_file: str, base: str, root: str, steps: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    with Coordinator(url, token_file=Path(token_file)) as coordinator:
        session = coordinator.open_session(resume_step=0)
        publish(coordinator, model, Path(base), Path(root), 0)
        feed = Feed(coordinator, session, Path(base), Path(root))
        trainer = StaleGRPOTrainer(
            model=model,
            reward_funcs=earned_by,
            args=config_of(session, Path(root) / "trl", int(steps)),
            train_dataset=Dataset.from_dict({"prompt": [""] * session.trajectories_per_step}),
            processing_class=AutoTokenizer.from_pretrained(base, local_files_only=True),
            rollout_func=feed.rollout,
            callbacks=[feed],
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
