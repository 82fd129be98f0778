r"""A server with OpenAI's completions and chat endpoints.

python scripts/serve.py
curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \
    -d '{"model": "pystdlib/target", "prompt": "import os\n", "max_tokens": 40}'
"""

from spsjax.cli import sections

get_config = sections.config(
    **sections.pair(),  # draft: whatever load_drafter takes; "": plain decoding
    **sections.quantize(),
    **sections.mesh(slots=1),
    name="",  # model name for clients; empty: the target's, or its folder's
    num_speculative_tokens="auto",  # or a number
    rows=8,  # maximum number of concurrent requests
    slots=512,  # maximum tokens per request, its prompt and K + 1 more included
    chunk=128,  # prompt tokens that are read between two runs of the loop
    rounds=4,  # per run of the loop: more are faster, and let requests wait longer
    logprobs=-1,  # most top_logprobs of a request; 0: of its tokens only; -1: no log-probabilities
    warm_up=True,  # compile before the first request, not when it comes
    host="127.0.0.1",  # 0.0.0.0: every network of this machine
    port=8000,  # 0: any free port
    most_waiting=64,  # requests that may wait for a row; more get status 429
    most_bytes=2**20,  # maximum size of a request's body
    most_tokens=4096,  # maximum number of new tokens per request
    page=("ngram", "suffix"),  # further drafters to choose from on the page at /
    grace_seconds=20,  # time to finish requests when the server is stopped
)
