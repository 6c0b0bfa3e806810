"""The turns of an environment in text, with its model's own tokenizer and chat template."""

import json

from echo2d.core.base.model_config import end_token_ids
from echo2d.tasks.served_task import ModelFiles
from echo2d.texts.model_texts import ModelTexts
from echo2d.texts.turns import TurnTexts


def make_turn_texts(model: ModelFiles) -> TurnTexts:
    """OperatorFault: the model's tokenizer cannot be read."""
    config = json.loads(model.files.get("config.json", b"{}"))
    return TurnTexts(
        ModelTexts(model.files, model.template, day=model.day),
        options=model.options,
        end_token_ids=end_token_ids(config),
        stops=model.stops,
    )
