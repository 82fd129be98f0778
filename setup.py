"""The package's metadata; there is none elsewhere."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "spsjax/utils/version.py").read_text("utf-8"), re.MULTILINE
)[1]
README = ROOT / "README.md"
REPOSITORY = ""  # address of the repository, which package indexes show; "": none yet

# What loads models and decodes. Some are there in any case: JAX requires scipy; Flax optax,
# orbax-checkpoint, pyyaml and rich; tokenizers filelock and tqdm.
CORE = [
    "absl-py",
    "filelock>=4.2",
    "flax",
    "gguf>=0.17.1",  # 2 MB, and most public models that fit a laptop are GGUF files
    "jax>=0.10,<0.13",
    "jinja2",
    "ml-collections",
    "numpy",
    "protobuf",
    "pyyaml",
    "rich",
    "safetensors",
    "scipy>=1.15",
    "sentencepiece",
    "tokenizers",
    "tqdm",
]
# What the features of the package need; spsjax.utils.extras names the one that is missing.
FEATURES = {
    "train": ["grain", "optax", "orbax-checkpoint", "tensorboardX"],
    "plots": ["matplotlib"],
    "eval": ["rouge-score"],
    "serve": ["prometheus-client", "pydantic", "starlette", "uvicorn"],
    "hub": ["huggingface_hub"],
}
ALL = sorted({package for packages in FEATURES.values() for package in packages})

setup(
    name="spsjax",
    version=VERSION,
    description="Lossless speculative sampling of language models in JAX",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="speculative decoding, speculative sampling, language models, inference, jax, tpu",
    project_urls={"Source": REPOSITORY} if REPOSITORY else {},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["spsjax", "spsjax.*"]),
    package_data={
        "spsjax": [
            "py.typed",
            "serving/page.html",
            # One pair of models: with pretrained/pycode, the wheel would have 76 MB instead of 40.
            *(f"pretrained/pystdlib/**/*.{suffix}" for suffix in ("safetensors", "json", "model")),
            "pretrained/pystdlib/README.md",
        ]
    },
    install_requires=CORE,
    extras_require={
        **FEATURES,
        "all": ALL,
        "test": [
            *ALL,
            "mypy>=2",
            "openai",
            "pytest<9.2",  # groups of pytest-xdist 3.8 have no effect with pytest 9.2
            "pytest-cov",
            "pytest-xdist",
            "ruff",
            "setuptools>=70.1",  # builds wheels by itself
            "zstandard",
        ],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
        # For machines without a TPU or a GPU, too.
        "tpu-compiler": ["libtpu"],
        "gpu-compiler": ["jax[cuda13]", "jax-cuda13-plugin[with-cuda]"],
        # Unpinned, torch resolves to a build with gigabytes of GPU libraries on some machines.
        "parity": ["torch==2.13.0", "transformers"],
        # Apart from `parity`, because it takes an older `transformers`.
        "openvino": ["torch==2.13.0", "openvino-genai", "optimum-intel"],
    },
)
