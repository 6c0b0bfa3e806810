"""An SGLang server as an engine: started and watched here, or one that runs already. Spoken to over HTTP on loopback.

    engine.py         SglangEngine: requests in, output out; the factory for the registry
    server.py         which server there is, and which version it serves
    weight_update.py  a refit: pause, update, flush, check, resume; what each answer means
    files.py          checks the snapshot before and after the server loads it
    generate.py       the body of a request, and what the chunks of its stream mean (pure)
    client.py         SGLang's paths over HTTP
    launch.py         the flags a server is started with
    compat.py         what differs between SGLang's versions, found by probing (pure)

What is not SGLang's own is in `engines/server`.
"""
