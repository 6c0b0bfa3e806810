"""The paths, headers and limits of the coordinator's HTTP API that the client and the server share.

`net/api` serves these paths; its `routes.py` lists all calls. A path's `{name}` is a field that the
client fills in and the server reads.
"""

SESSION_PATH = "/v1/learner/session"
ALIVE_PATH = "/v1/learner/alive"
CHECKPOINT_PATH = "/v1/learner/checkpoint"
VERSIONS_PATH = "/v1/versions"
FILES_PATH = "/v1/versions/{version}/files"  # followed by a file's path in the snapshot
BATCH_PATH = "/v1/batches/{step}"
COMMIT_PATH = "/v1/batches/{step}/commit"
REFUSE_PATH = "/v1/batches/{step}/refuse"
ATTACHMENT_PATH = "/v1/attachments/{digest}"
EVALUATIONS_PATH = "/v1/evaluations"
SAMPLES_PATH = "/v1/samples"
OPERATION_PATH = "/v1/tinker/operation"
RESULT_PATH = "/v1/tinker/operation/result"
WORKER_ORDER_PATH = "/v1/workers/{peer}/{order}"
STATUS_PATH = "/v1/status"
OWN_STATUS_PATH = "/v1/status/own"

# Headers of a batch: its digest in hex, and the staleness bound S under which it was made.
DIGEST_HEADER = "X-Echo2d-Digest"
STALENESS_HEADER = "X-Echo2d-Staleness-Max"

# Most bytes of a JSON body; the longest one refuses all groups of a batch, each with a reason.
BODY_BYTES_MAX = 1 << 20
# A request for a batch that is not ready is answered after this time, and the client repeats it.
LONG_POLL_S = 30.0
# Scores in one commit: one for each trajectory of the largest batch (`unpack_batch`). A body with
# this many is below BODY_BYTES_MAX.
SCORES_MAX = 1 << 14
# The largest k and |z|: a larger number means the same, and could make a mean infinite.
SCORE_MAX = 1e6
