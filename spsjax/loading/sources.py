"""Sources of models: folders in the Hugging Face layout, and GGUF files."""

import abc
import dataclasses
import functools
import pathlib

from spsjax import tokenization
from spsjax.models import transformer
from spsjax.models.gguf import header as gguf_header
from spsjax.models.gguf import metadata as gguf_metadata
from spsjax.models.gguf import tensors as gguf_tensors
from spsjax.models.hf import weights as hf_weights
from spsjax.tokenization import Tokenizer
from spsjax.tokenization import gguf as gguf_tokenizers
from spsjax.types import PyTree


class Source(abc.ABC):
    """A folder or a file with a model. All methods raise InputError for one that cannot be used."""

    @abc.abstractmethod
    def config(self) -> transformer.Config:
        """Returns the shape of the model."""

    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer; None: there is none."""

    @abc.abstractmethod
    def params(self, config: transformer.Config, dtype, sharding_of, convert) -> PyTree:
        """Returns the parameters; the arguments are those of `hf_weights.read_params`."""


def of(path: pathlib.Path) -> Source:
    """Returns the source at a path: a folder, or else a GGUF file."""
    return _Folder(path) if path.is_dir() else _GGUF(path)


@dataclasses.dataclass(frozen=True)
class _Folder(Source):
    path: pathlib.Path

    def config(self):
        return hf_weights.read_config(self.path)

    def tokenizer(self):
        return tokenization.load(self.path) if tokenization.exists(self.path) else None

    def params(self, config, dtype, sharding_of, convert):
        return hf_weights.read_params(self.path, config, dtype, sharding_of, convert)


@dataclasses.dataclass(frozen=True)
class _GGUF(Source):
    path: pathlib.Path

    @functools.cached_property
    def _header(self) -> gguf_header.Header:
        return gguf_header.read(self.path)

    def config(self):
        return gguf_metadata.read_config(self._header)

    def tokenizer(self):
        return gguf_tokenizers.load(self.path, self._header.metadata)

    def params(self, config, dtype, sharding_of, convert):
        tensors = gguf_tensors.Tensors(self._header, config, dtype)
        return hf_weights.read_tensors(tensors, config, dtype, sharding_of, convert)
