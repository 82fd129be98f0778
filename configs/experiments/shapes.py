"""Times of the loop at given shapes, against the memory's bandwidth and Hugging Face.

C=configs/experiments/shapes.py
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_COMPILATION_CACHE_DIR=runs/cache
python scripts/benchmark.py --config=$C --workdir=runs/gpu
python scripts/benchmark.py --config=$C --workdir=runs/fused --config.kernels="('off','on')"
python scripts/benchmark.py --config=$C --workdir=runs/gpu --config.loop=False --peer=hf
python scripts/benchmark.py --config=$C:tiny --workdir=runs/tiny   # all of it, in a minute on a CPU

Weights are random and acceptance is forced, so that no trained pair is needed for times.
Hardware: one accelerator with 140 GB of memory, as an H200; what does not fit is named and left
out. The same command measures what is missing, and compiles only what the cache lacks. Hugging Face
has a process of its own, because JAX keeps the memory that it once had.
"""

import ml_collections

from spsjax.cli import sections
from spsjax.models.config import sizes

_TINY = sizes(2, 64, 128, 4, 2, vocab_size=512, max_positions=4096)
_TINY_CHANGES = {
    "pairs": {"tiny": {"target": _TINY, "draft": _TINY | {"num_layers": 1}}},
    "changes": {},
    "batches": (1,),
    "contexts": (16,),
    "num_speculative_tokens": (2,),
    "trees": ((2, 1),),
    "scored": (),
    "new_tokens": 16,
    "threads": 2,
    "repetitions": 1,
    "peer": {"batches": (1,), "contexts": (16,), "new_tokens": 8},
    "flips": {"prompts": 1, "prompt_tokens": 16, "new_tokens": 16},
}


def get_config(size: str = "full") -> ml_collections.ConfigDict:
    """Returns the pairs, and which batches, contexts and drafts are timed."""
    config = ml_collections.ConfigDict(
        {
            "benchmark": "shapes",
            # Names of configs/models, and changes to them.
            "pairs": {
                "smollm2": {"target": "smollm2:135m", "draft": "smollm2:draft"},
                "gpt2_xl": {"target": "gpt2:xl", "draft": "gpt2:small"},
                "llama_8b": {"target": "llama:3.1-8b", "draft": "llama:3.2-1b"},
                "wide_shallow": {"target": "wide_shallow:target", "draft": "wide_shallow:draft"},
            },
            "changes": {"max_positions": 4096},
            "loop": True,  # whether the loop is measured
            "batches": (1, 8, 32),
            "contexts": (128, 2048),
            "num_speculative_tokens": (4, 1, 2, 3, 5, 6, 7, 8),  # all but the first at batch 1 only
            "kernels": ("off",),  # ("off", "on"): also with fused operations (docs/guides/gpus.md)
            "trees": ((4, 1, 1, 1), (4, 2, 1, 1, 1, 1, 1, 1)),  # 16 and 60 nodes
            "scored": (2, 9, 17, 61),  # tokens per scoring pass alone, in addition to 1 and K + 1
            "acceptance": 0.8,
            "new_tokens": 64,
            "sampling": sections.sampling(),
            "repetitions": 3,
            "threads": 8,  # compiler threads
            "compile_seconds": 150.0,  # no cell begins to compile later
            "seconds": 400.0,  # no cell begins to be timed later
            "profiled": 0,  # cells per pair whose program is also traced
            "peer": {  # with --peer=hf
                "variants": ("plain", "assisted", "compiled"),
                "batches": (1, 8, 32),
                "contexts": (128,),
                "num_speculative_tokens": 4,
                "new_tokens": 48,
                "repetitions": 2,
                "seconds": 60.0,  # per pair; no call begins to be timed later
            },
            "flips": {
                "target": "pystdlib/target",
                "draft": "pystdlib/draft",
                "prompts": 16,  # 0: no comparison of texts
                "prompt_tokens": 64,
                "new_tokens": 128,
            },
        }
    )
    if size == "tiny":
        config.update(_TINY_CHANGES)
        for name in {*config.pairs} - {"tiny"}:
            del config.pairs[name]
    elif size != "full":
        raise ValueError(f"size: expected full or tiny, found {size}")
    return config
