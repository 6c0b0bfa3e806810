"""Uses an SGLang server as an engine, over HTTP.

The engine starts the server itself and watches it, or attaches to a server that runs already.

    engine.py         SglangEngine: requests in, output out; the factory for the registry
    server.py         Serving: the server in use, and the version that it serves
    weight_update.py  a refit: pause, update, flush, identify, resume; what each answer means
    files.py          checks the snapshot before and after the server loads it
    generate.py       the body of a request, and the meaning of its stream's chunks (pure)
    client.py         SGLang's paths over HTTP
    launch.py         the flags that start a server
    compat.py         differences between SGLang's versions, found by probing (pure)

Code that any HTTP engine can use is in `engines/server`.
"""
