"""Chinchilla 70B and its 4B draft on 16 chips, as in Chen et al. 2023 (arXiv 2302.01318).

python scripts/compile.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py

Hardware: a CPU. The programs are compiled for the named TPU slice and are not run.
Time: five minutes on two slow cores (libtpu 0.0.52).
Figures: 10.40 of 102.01 GB per chip. By lower bounds from published figures, and at an acceptance
rate of 0.8, the speed-up over autoregressive sampling is 2.69 (docs/archive/0.1_tpu_compiler.md).
"""

from spsjax.cli import sections

get_config = sections.config(
    target="chinchilla_70b",  # of configs/models
    draft="chinchilla_draft_4b",
    head={  # sizes of --drafter; 0 or (): the default
        "d_model": 0,
        "d_ff": 0,
        "num_heads": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
        "vocab_size": 0,  # of eagle3
        "tap_layers": (),
        "num_layers": 0,  # of dflash, dflash2, dspark and gemma4_assistant
        "block_size": 0,  # of the same
    },
    dtype="bfloat16",
    quantize="",  # the target's matrices: int8, int8_dynamic; empty: of this type
    data=1,  # of the mesh; the other chips split the weights
    split_slots=1,  # chips that hold different slots of each cache, for long rows
    replicate=False,  # whether every chip holds all weights of the draft
    batch=1,
    prompt_tokens=1024,
    max_new_tokens=512,
    num_speculative_tokens=4,
    tree="",  # file of plan.py, whose tree has K levels; empty: a chain
    acceptance=0.8,  # of a draft token, for the predicted speed-up
    compiler_options="",  # of the TPU's compiler: name=value,name=value
    collective_us=0.0,  # assumed latency per collective; its bytes take further time
)
