"""Runs a recipe with models whose LoRA weights begin the same in each run. The client's environment runs it:

python tests/support/tinker_seeded.py LORA_SEED MODULE ARGUMENTS...

Recipes name no seed. So a model that one makes gets this one; nothing else differs from `python -m MODULE`.
"""

import functools
import runpy
import sys
from typing import Any

import tinker

seed, module, *arguments = sys.argv[1:]
# The modules beside this file have names that libraries use, too.
del sys.path[0]
create = tinker.ServiceClient.create_lora_training_client


@functools.wraps(create)
def create_seeded(self: Any, *given: Any, **named: Any) -> Any:
    named.setdefault("seed", int(seed))
    return create(self, *given, **named)


tinker.ServiceClient.create_lora_training_client = create_seeded
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
