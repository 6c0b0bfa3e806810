"""Checks the form of a worker's result, and joins it to what its sample had before.

The check is the same for every kind of work with prompts from tasks. Not here: whether the result
is still wanted.
"""

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.answer_end import WHOLE_ENDS, OutputLimit
from echo2d.core.protocol.columns import wanted_columns
from echo2d.core.protocol.control_messages import Finish, SampleFinished
from echo2d.core.protocol.result_check import Believed, result_fault
from echo2d.core.protocol.trajectory import NOTHING, Partial, authored
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import TaskRules

Written = tuple[Partial, Finish]


def written_by(
    author: PeerId,
    message: SampleFinished,
    base: Partial,
    *,
    rules: RunRules,
    task: TaskRules,
    prompt: bytes,
    believed: Believed,
) -> Written | str:
    """All that the sample has with this result, and why it ends; or a text that says what is wrong with the result.

    base: what the attempt continued from. believed: whether the worker may have written with a version.
    """
    start, branch = (0, 0) if base is NOTHING else (base.turn_start, base.branch_start)
    limit = rules.limit(task, prompt, start, branch)
    if message.finish == "context" and rules.context_max is None:
        # Only the worker knows this model's context.
        limit = OutputLimit(base.length + len(message.tokens) // 4, "context")
    fault = result_fault(
        message,
        vocab_size=rules.vocab_size,
        limit=limit,
        stop_token_ids=task.stop_token_ids,
        believed=believed,
        base=base,
        stop_strings=bool(task.stop_strings),
        experts=rules.experts,
    )
    if fault:
        return fault
    spans = authored(message.spans, author)
    columns = message.columns and wanted_columns(message.columns, rules.columns)
    whole = base.plus(message.tokens, message.logprobs, spans, shift=base.length, columns=columns)
    return whole, message.finish if message.finish in WHOLE_ENDS else limit.finish
