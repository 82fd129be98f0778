r"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118) and Gemma 3 (2025, arXiv 2503.19786): `gemma:2-9b`.

python scripts/compile.py --topology=v5e:2x4 --config=configs/experiments/chinchilla_70b.py \
    --config.target=gemma:2-9b --config.draft=gemma:2-2b

Sizes: 2-2b, 2-9b, 2-27b, 3-270m, 3-1b, 3-4b, 3-12b and 3-27b. Gemma 3 is multimodal from 4B on, and
the config is that of its language model.
Hardware: any with memory for the weights; the command needs a CPU and libtpu. Not measured.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

_SECOND = {
    "vocab_size": 256_000,
    "max_positions": 8192,
    "windows": (4096, 0),
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
_THIRD = {"qk_norm": True, "rope_theta": 1e6, "rope_theta_local": 10_000.0}
_SMALL = _THIRD | {"vocab_size": 262_144, "max_positions": 32_768, "windows": (512,) * 5 + (0,)}
_LARGE = _THIRD | {
    "vocab_size": 262_145,
    "padded_vocab_size": 262_208,
    "max_positions": 131_072,
    "windows": (1024,) * 5 + (0,),
    "rope_scaling": ("linear", 8.0),
}
SIZES = {
    "2-2b": _SECOND | sizes(26, 2304, 9216, 8, 4, 256),
    "2-9b": _SECOND | sizes(42, 3584, 14_336, 16, 8, 256),
    "2-27b": _SECOND | sizes(46, 4608, 36_864, 32, 16, 128) | {"query_scale": 144**-0.5},
    "3-270m": _SMALL | sizes(18, 640, 2048, 4, 1, 256),
    "3-1b": _SMALL | sizes(26, 1152, 6912, 4, 1, 256),
    "3-4b": _LARGE | sizes(34, 2560, 10_240, 8, 4, 256),
    "3-12b": _LARGE | sizes(48, 3840, 15_360, 16, 8, 256),
    "3-27b": _LARGE | sizes(62, 5376, 21_504, 32, 16, 128) | {"query_scale": 168**-0.5},
}

# The fields of `spsjax.models.config.Config`.
get_config = sections.family(
    SIZES, ffn="geglu", norm_offset=1.0, post_norms=True, embed_scale=True, norm_eps=1e-6
)
