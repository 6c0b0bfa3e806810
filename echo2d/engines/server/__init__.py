"""An engine whose model runs in an HTTP server beside the worker.

    engine.py         ServerEngine: requests in, output out
    serving.py        the server in use, and the version that it serves
    launch.py         how a server is started or reached, by the operator's options
    weight_update.py  what a refit is asked to do; each kind of server has its own steps
    memory.py         has the server write a version's changed words into its memory
    inside/           our module in the server, which does that and imports nothing of echo2d
    weight_files.py   checks a snapshot before and after the server loads it
    adapters.py       the adapters that the server holds beside its base
    sampling_loop.py  generates each sample to its end, with a new request after each cut by a refit
    calls.py          the samples of a generation call, and the output of each so far
    continuation.py   chunks of one request -> tokens, each under the version that wrote it (pure)
    admission.py      how many samples run at once, by the load that the server reports (pure)
    http_client.py    calls and streams over HTTP, with keys
    recompute.py      measures the cost of computing KV caches again after a refit (pure)
    process.py        the server as a process: starts it, kills it with its children, reads its log
    process_guard.py  the process between worker and server: ends the server when the worker ends, and
                      keeps its log

A server's own package adds its words: paths, request bodies, chunks, flags, and how weights are
updated. Nothing here imports it.
"""
