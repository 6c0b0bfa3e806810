"""A SGLang server as an engine: started and watched here, or one that runs already. Spoken to over HTTP on loopback.

engine.py    SglangEngine: requests in, deltas out
serving.py   which server there is, and which version it serves
writing.py   samples to their ends, piece by piece; how many at once
calls.py     a call's samples, and what each has so far
swap.py      a refit: pause, update, flush, check, go on; what each answer means
files.py     the snapshot, looked at before and after it is loaded
piece.py     chunks of one streamed request -> tokens, each under the version that wrote it (pure)
room.py      how many samples run at once, by what the server says of itself (pure)
dialect.py   what differs between SGLang's versions, found by probing (pure)
wire.py      its HTTP: calls, streams, keys
process.py   a server as a process: started, killed whole, its log
guard.py     the process between: ends the server with this one, keeps its log
"""
