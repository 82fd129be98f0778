"""Long contexts and large batches: which way to draft pays, on which devices.

python scripts/plan_context.py --workdir=runs/context
python scripts/plan_context.py --workdir=runs/context --measure

Hardware: any; devices of the map need not be there. With --measure, the model of `measured` is
timed on this machine: a few minutes on two CPU cores (under 3 for four of the points, with two
repetitions and 20 new tokens).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns models, devices, the map's axes, and what is measured."""
    return ml_collections.ConfigDict(
        {
            "target": "llama:3.1-8b",
            "draft": "llama:3.2-1b",
            # Kinds and numbers of devices; a TPU7x chip is two.
            "devices": ("v5e:8", "v5p:4", "v6e:4", "tpu7x:4", "H200:1"),
            "batches": (1, 4, 16, 64, 256),
            "contexts": (1024, 4096, 16_384, 32_768, 65_536, 131_072),
            "slots": 512,  # of small caches
            # Assumed, of a draft model, of one with a small cache, and of the target with one.
            "acceptance": {"model": 0.75, "window": 0.7, "sparse_self": 0.85},
            "most_tokens": 8,  # greatest K
            "collective_us": 1.0,  # assumed, of every all-reduce, beside its bytes
            "measured": {
                "shape": {
                    "vocab_size": 4096,
                    "d_model": 512,
                    "d_ff": 1280,
                    "num_layers": 4,
                    "num_heads": 8,
                    "num_kv_heads": 8,
                    "head_dim": 64,
                    "max_positions": 65_536,
                },
                # Batch and context of each point.
                "points": ((8, 2048), (8, 8192), (8, 32_768), (32, 2048), (32, 8192)),
                "slots": 256,
                "num_speculative_tokens": 4,
                "acceptance": 0.85,
                "new_tokens": 32,
                "repetitions": 3,
            },
        }
    )
