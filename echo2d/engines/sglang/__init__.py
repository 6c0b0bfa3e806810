"""What is SGLang's own in an engine whose model runs in an SGLang server; all else is in `engines/server`.

engine.py         SglangEngine, the flags that start a server, and the factory for the registry
client.py         SGLang's paths over HTTP
generate.py       the body of a request, and the meaning of its stream's chunks (pure)
weight_update.py  a refit: pause, update, flush, identify, resume; what each answer means
compat.py         differences between SGLang's versions, found by probing (pure)
"""
