"""The package's metadata; there is none elsewhere."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "spsjax" / "__init__.py").read_text("utf-8"), re.MULTILINE
)[1]
README = ROOT / "README.md"
SERVE = ["starlette", "uvicorn", "pydantic", "prometheus-client"]

setup(
    name="spsjax",
    version=VERSION,
    description="Lossless speculative sampling of language models in JAX",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["spsjax", "spsjax.*"]),
    package_data={
        "spsjax": [
            "serving/page.html",
            *(f"pretrained/**/*.{suffix}" for suffix in ("safetensors", "json", "model", "md")),
        ]
    },
    install_requires=[
        "absl-py",
        "filelock>=4.2",
        "flax",
        "gguf>=0.17.1",
        "grain",
        "jax>=0.10,<0.13",
        "jinja2",
        "ml-collections",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "protobuf",
        "pyyaml",
        "rich",
        "rouge-score",
        "safetensors",
        "scipy>=1.15",
        "sentencepiece",
        "tensorboardX",
        "tokenizers",
        "tqdm",
    ],
    extras_require={
        # Groups of pytest-xdist 3.8 have no effect with pytest 9.2.
        "test": ["mypy>=2", "pytest<9.2", "pytest-xdist", "ruff", "zstandard", *SERVE, "openai"],
        "plots": ["matplotlib"],
        "serve": SERVE,
        "hub": ["huggingface_hub"],
        "tpu-compiler": ["libtpu"],  # for machines without a TPU, too
        # Unpinned, torch resolves to a build with gigabytes of GPU libraries on some machines.
        "parity": ["torch==2.13.0", "transformers"],
        # Apart from `parity`, because it takes an older `transformers`.
        "openvino": ["torch==2.13.0", "openvino-genai", "optimum-intel"],
    },
)
