"""What is vLLM's own in an engine whose model runs in a vLLM server; all else is in `engines/server`.

engine.py           VllmEngine, the flags that start a server, and the factory for the registry
client.py           vLLM's paths over HTTP, or over a socket of the file system
generate.py         the body of a request, and the meaning of its stream's chunks (pure)
weight_update.py    a refit: pause, load, label, identify, resume
worker_extension/   our module in the server's worker processes, which imports nothing of echo2d
"""
