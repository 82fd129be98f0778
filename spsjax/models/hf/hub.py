"""Downloads from the Hugging Face Hub."""

import pathlib
from collections.abc import Sequence

from spsjax.errors import InputError, one_line
from spsjax.models.hf import weights as hf_weights
from spsjax.utils import extras

PREFIX = "hf://"
# Longest excerpt of a message of the library. Some messages fill pages.
_MESSAGE_LENGTH = 300


def download(name: str, tokenizer_files: Sequence[str] = (), weights: bool = False) -> pathlib.Path:
    """Downloads a repository of the hub and returns its local folder.

    It fetches only files that this package reads, and no file that is in the local cache.

    Args:
        name: repository and optional revision, as "hf://openai-community/gpt2@main".
        tokenizer_files: names of the tokenizer files to fetch.
        weights: whether to fetch the weights.

    Raises:
        InputError: the package huggingface_hub is missing, the download fails, or the repository
            has no safetensors.
    """
    files = ["config.json", "generation_config.json", hf_weights.INDEX, *tokenizer_files]
    folder = _fetch(name, files)
    if not weights:
        return folder
    # The index has the names of the weight files, so it is fetched before them.
    index = folder / hf_weights.INDEX
    shards = {*hf_weights.read_index(index).values()} if index.exists() else ()
    folder = _fetch(name, [*files, hf_weights.SINGLE, *shards])
    if not index.exists() and not (folder / hf_weights.SINGLE).exists():
        raise InputError(
            f"{name}: expected {hf_weights.SINGLE} or its index, found neither; "
            f"pytorch_model.bin is not read: {hf_weights.PICKLE}"
        )
    return folder


def _fetch(name: str, files: list[str]) -> pathlib.Path:
    """Fetches files of a repository and returns its local folder."""
    with extras.needed("hub"):
        import huggingface_hub

    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=files
        )
    except Exception as error:  # the library raises many types
        raise InputError(
            f"{name}: expected a repository of the hub, found {one_line(error)[:_MESSAGE_LENGTH]}"
        ) from None
    return pathlib.Path(folder)
