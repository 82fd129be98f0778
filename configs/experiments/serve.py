"""A server with OpenAI's completions and chat endpoints.

python scripts/serve.py
curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
    -d '{"model": "pystdlib/target", "prompt": "import os\\n", "max_tokens": 40}'
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Returns the models, the engine's sizes, and what clients may do."""
    return ml_collections.ConfigDict(
        {
            "target": "pystdlib/target",
            "draft": "pystdlib/draft",  # or whatever load_drafter takes; "": plain decoding
            "name": "",  # by which clients ask for it; empty: the target's, or its folder's
            "dtype": config_dict.placeholder(str),  # None: what suits the device
            "quantize": config_dict.placeholder(str),  # the target: int8, int8_dynamic
            "mesh": {"data": 1, "model": 1, "slots": 1},  # devices; model = 0: all that there are
            "num_speculative_tokens": "auto",  # or a number
            "rows": 8,  # most requests that run at the same time
            "slots": 512,  # most tokens of each, its prompt and K + 1 more included
            "chunk": 128,  # tokens of prompts that are read between two runs of the loop
            "rounds": 4,  # of a run of the loop: more are faster, and let requests wait longer
            "warm_up": True,  # compile before the first request, not when it comes
            "host": "127.0.0.1",  # 0.0.0.0: every network that this machine is in
            "port": 8000,  # 0: any that is free
            "most_waiting": 64,  # requests that may wait for a row; more get status 429
            "most_bytes": 2**20,  # of a request's body
            "most_tokens": 4096,  # new tokens of a request
            "page": ("ngram", "suffix"),  # drafters to choose on the page at /, beside `draft`
            "grace_seconds": 20,  # for which requests may go on when the server is stopped
        }
    )
