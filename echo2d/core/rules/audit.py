"""How workers are audited: the [audit] table, and what else the core needs to know about audits."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from echo2d.core.protocol.control_messages import SeedReplay
from echo2d.core.rules.table import Table, key


class AnswerClass(NamedTuple):
    """A class of answers that share limits; the limits are learnt from all of them together."""

    # As the Hello of their worker says.
    quantization: str = ""
    # Their KV caches may mix versions.
    mixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTable(Table):
    TABLE: ClassVar[str] = "audit"

    enabled: bool = key(
        "score workers' answers again, and quarantine workers whose answers are not the model's",
        False,
    )
    trusted: tuple[str, ...] = key(
        "tokens whose workers are trusted: limits for all workers are learnt from their answers", ()
    )
    share: float = key(
        "for a worker in good standing, the share of its answers that is scored",
        0.05,
        low=0.0,
        high=1.0,
    )
    newcomer: int = key(
        "this many answers of a new worker are scored before any of them is trained on",
        20,
        low=0,
        high=1000,
    )
    wait_s: float = key(
        "seconds that an answer waits for its verdict before another worker gets its prompt",
        60.0,
        above=0.0,
        high=3600.0,
    )
    seeds: SeedReplay = key(
        "how all engines of this run draw tokens: torch; sglang with --enable-deterministic-inference; "
        "none: not by the coordinator's seeds",
        "torch",
    )
    logprobs: bool = key(
        "a clean prefill gives the logprobs that engines report; false turns their comparison off for all workers",
        True,
    )
    in_place: bool = key(
        "workers may refit in place (worker.refit_mode): answers that one worker wrote with "
        "several versions get limits of their own",
        False,
    )
    device: str = key("where the auditor runs: cpu, cuda, cuda:1", "cpu")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "the auditor's precision; auto: float32 on the CPU, else bfloat16", "auto"
    )
    threads: int = key("CPU threads of the auditor; 0: torch decides", 1, low=0, high=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules(AuditTable):
    """The [audit] table of a run whose audit is enabled."""

    # How answers are drawn and scored, in words.
    scored_as: str = ""

    @property
    def trusts(self) -> bool:
        """Whether the operator trusts some workers."""
        return bool(self.trusted)

    def name_of(self, kind: AnswerClass) -> str:
        """The class and all else that limits depend on, in words: limits with another name do not apply."""
        facts = (
            self.seeds,
            "" if self.logprobs else "logprobs off",
            self.scored_as,
            kind.quantization,
            "mixed KV" if kind.mixed else "",
        )
        return ", ".join(filter(None, facts))
