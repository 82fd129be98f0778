"""Shapes and time limits of scripts/gpu_suite.sh, as `:full` or `:tiny`.

bash scripts/gpu_suite.sh runs/gpu          # what nine minutes on one accelerator allow
bash scripts/gpu_suite.sh runs/gpu --tiny   # a part of everything, in a minute on a CPU

Weights are random and acceptance is forced, so that no trained pair is needed for times.
Hardware: one accelerator with 140 GB of memory, as an H200; what does not fit is named and left
out.
"""

import ml_collections

_TINY = {
    "vocab_size": 512,
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_positions": 4096,
}


def get_config(size: str = "full") -> ml_collections.ConfigDict:
    """Returns the pairs, and which batches, contexts and drafts are timed."""
    config = ml_collections.ConfigDict(
        {
            # Names of configs/models, and changes to them.
            "pairs": {
                "gpt2_xl": {"target": "gpt2:xl", "draft": "gpt2:small"},
                "llama_8b": {"target": "llama:3.1-8b", "draft": "llama:3.2-1b"},
                "wide_shallow": {"target": "wide_shallow:target", "draft": "wide_shallow:draft"},
            },
            "changes": {"max_positions": 4096},
            "batches": (1, 8, 32),
            "contexts": (128, 2048),
            "num_speculative_tokens": (4, 1, 2, 3, 5, 6, 7, 8),  # all but the first at batch 1 only
            "trees": ((4, 1, 1, 1), (4, 2, 1, 1, 1, 1, 1, 1)),  # 16 and 60 nodes
            "scored": (2, 9, 17, 61),  # tokens of a scoring pass alone, beside 1 and K + 1
            "acceptance": 0.8,
            "new_tokens": 64,
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            "repetitions": 3,
            "threads": 8,  # that compile
            "compile_seconds": 100.0,  # none begins to compile later
            "seconds": 40.0,  # none begins to be timed later, per pair
            "huggingface": {
                "variants": ("plain", "assisted", "compiled"),
                "batches": (1, 8, 32),
                "contexts": (128,),
                "num_speculative_tokens": 4,
                "new_tokens": 48,
                "repetitions": 2,
                "compile_seconds": 80.0,  # no call that compiles begins later
                "seconds": 20.0,  # none begins to be timed later, per pair
            },
            "flips": {
                "target": "pystdlib/target",
                "draft": "pystdlib/draft",
                "prompts": 16,
                "prompt_tokens": 64,
                "new_tokens": 128,
            },
        }
    )
    if size == "tiny":
        config.update(
            {
                "pairs": {"tiny": {"target": dict(_TINY), "draft": _TINY | {"num_layers": 1}}},
                "changes": {},
                "batches": (1,),
                "contexts": (16,),
                "num_speculative_tokens": (2,),
                "trees": ((2, 1),),
                "scored": (),
                "new_tokens": 16,
                "threads": 2,
                "repetitions": 1,
                "huggingface": {"batches": (1,), "contexts": (16,), "new_tokens": 8},
                "flips": {"prompts": 1, "prompt_tokens": 16, "new_tokens": 16},
            }
        )
        del config.pairs["gpt2_xl"], config.pairs["llama_8b"], config.pairs["wide_shallow"]
    elif size != "full":
        raise ValueError(f"size: expected full or tiny, found {size}")
    return config
