"""What an engine needs whose model runs in an HTTP server beside the worker, whatever that server
is.

    sampling_loop.py  writes each sample to its end, as a chain of requests where refits cut it
    calls.py          a generation call's samples, and what each has so far
    continuation.py   chunks of one request -> tokens, each under the version that wrote it (pure)
    admission.py      how many samples run at once, by what the server reports of its load (pure)
    http_client.py    calls and streams over HTTP, with keys
    process.py        the server as a process: started, killed with its children, its log
    process_guard.py  the process between: ends the server when the worker ends, and keeps its log

A server's own package adds its dialect: paths, request bodies, chunks, flags, and how weights are
updated. Nothing here imports it.
"""
