"""Common layout of folders of `speculators`: draft vocabularies, copies of the target's tensors.

A draft vocabulary is stored as two tables. `d2t` has, for each row of the draft's head, the
difference between the token's id in the target and the row. `t2d` has, for each token of the
target, whether the draft vocabulary has it; it follows from the other.
"""

import pathlib
from collections.abc import Mapping, Set
from typing import Any, TypeVar

import numpy as np
from jax.typing import DTypeLike

from spsjax.drafters.features import FeatureDrafter
from spsjax.drafters.folders import Folder, Layout
from spsjax.drafters.vocabulary import IDS
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import weights
from spsjax.models.hf.fields import COUNT
from spsjax.types import PyTree

KEY = "speculators_model_type"
METHODS = "dflash", "dflash2", "dspark", "eagle3", "mtp"
HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_COPIES = _EMBEDDING, "t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight"


D = TypeVar("D", bound=FeatureDrafter)


class SpeculatorsLayout(Layout[D]):
    """Layout of drafters whose vocabulary may be their own, with copies of the target's tensors.

    Attributes:
        rows: names of the tensors with one row per token of the draft vocabulary.
    """

    rows: Set[str] = frozenset({HEAD})

    def is_copy(self, name: str, drafter: D) -> bool:
        return name in _COPIES

    def constants(self, folder: Folder, drafter: D) -> dict[str, np.ndarray]:
        return {name: np.sort(_ids(folder, drafter)) for name in drafter.constants}

    def tensor(
        self, folder: Folder, drafter: D, file: Any, name: str, shape: tuple[int, ...]
    ) -> np.ndarray:
        if name not in self.rows:
            return super().tensor(folder, drafter, file, name, shape)
        if "d2t" in folder.stored:
            rows = super().tensor(folder, drafter, file, name, shape)
            return rows[np.argsort(_ids(folder, drafter))]
        # There may be rows for the padding of the target's vocabulary, too.
        padded = drafter.target.vocab_rows, *shape[1:]
        whole = tuple(file.get_slice(name).get_shape()) == padded
        rows = super().tensor(folder, drafter, file, name, padded if whole else shape)
        return rows[: shape[0]]

    def tensors(self, drafter: D, params: PyTree, dtype: DTypeLike) -> dict[str, np.ndarray]:
        tensors = super().tensors(drafter, params, dtype)
        if IDS in drafter.constants and HEAD in tensors:
            ids = np.asarray(params[IDS])
            tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
            tensors["t2d"] = np.isin(np.arange(drafter.target.vocab_rows), ids)
        return tensors

    def difference(self, folder: Folder, target_params: PyTree) -> str | None:
        if _EMBEDDING not in folder.stored:
            return None
        differs_here = differs(folder, _EMBEDDING, target_params["embed"]["embedding"])
        return "embed_tokens" if differs_here else None


def differs(folder: Folder, name: str, matrix: Any, axis: int = 0) -> bool:
    """Returns whether a stored copy of a matrix of the target, of one row per token, differs.

    `axis` is the matrix's axis of tokens. It compares 64 rows, because whole matrices take too long
    to read. Of a matrix that is quantized or on other processes it cannot tell: False.
    """
    if not getattr(matrix, "is_fully_addressable", False):
        return False
    path = folder.stored[name]
    stored = weights.open_all([path])[path].get_slice(name)
    rows, *width = stored.get_shape()
    if rows == 0 or width != [matrix.shape[1 - axis]]:
        return True
    size = min(matrix.shape[axis], rows)
    chosen = np.arange(0, size, max(size // 64, 1))
    stored_rows = np.concatenate([stored[row : row + 1] for row in chosen.tolist()])
    own = np.asarray(matrix[chosen] if axis == 0 else matrix[:, chosen].T).astype(np.float32)
    distance = np.abs(stored_rows.astype(np.float32) - own).mean()
    return bool(distance > 0.05 * np.abs(own).mean())


def vocabulary_of(folder: Folder, target: Config) -> tuple[int, bool]:
    """Returns the size of a folder's draft vocabulary, and whether the folder has a head.

    Raises InputError if tables, head and config.json do not fit each other.
    """
    head, ids = shapes(folder.stored, HEAD, "d2t")
    size = folder.fields.get("draft_vocab_size", COUNT, None)
    rows = (head or ids or [size or target.vocab_size])[0]
    whole = target.vocab_size, target.vocab_rows
    if ids and not 0 < rows <= target.vocab_size:
        expected = f"between 1 and the target's {target.vocab_size} tokens"
        raise folder.fields.error("draft_vocab_size", expected, rows)
    if not ids and rows not in whole:
        raise InputError(
            f"{folder.path}: expected a tensor d2t, the draft's vocabulary, found none"
        )
    if ids and not head:
        raise InputError(f"{folder.path}: expected a tensor {HEAD} beside d2t, found none")
    if size not in (None, rows) and not (size in whole and rows in whole):
        raise folder.fields.error("draft_vocab_size", f"{rows}, the rows of the head", size)
    return rows if ids else target.vocab_size, bool(head)


def proposals(
    method: str, drafter: FeatureDrafter, target_name: str, architectures: list[str]
) -> dict:
    """Returns the part of a config.json that names the method, its draft length and the target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": method,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target_name, "architectures": architectures},
    }


def shapes(stored: Mapping[str, pathlib.Path], *names: str) -> list[list[int] | None]:
    """Returns the shapes of tensors; None: there is no such tensor."""
    files = weights.open_all({stored[name] for name in names if name in stored})
    return [
        files[stored[name]].get_slice(name).get_shape() if name in stored else None
        for name in names
    ]


def _ids(folder: Folder, drafter: Any) -> np.ndarray:
    """Returns the target's ids of the head's rows; the tensor has their differences to 0, 1, ..."""
    count, vocab_size = np.arange(drafter.vocab_size), drafter.target.vocab_size
    if "d2t" not in folder.stored:
        return count
    path = folder.stored["d2t"]
    offsets = weights.open_all([path])[path].get_slice("d2t")
    if offsets.get_shape() != [len(count)]:
        raise InputError(f"{path}: d2t: expected shape {[len(count)]}, found {offsets.get_shape()}")
    if offsets.get_dtype() not in ("I64", "I32"):
        raise InputError(f"{path}: d2t: expected integers, found {offsets.get_dtype()}")
    ids = count + offsets[...].astype(np.int64)
    problem = f"ids from {ids.min()} to {ids.max()}"
    if len(np.unique(ids)) < len(ids):
        problem += ", some of them twice"
    elif ids.min() >= 0 and ids.max() < vocab_size:
        _check_marks(folder, ids)
        return ids
    raise InputError(
        f"{path}: d2t: expected offsets of different ids in [0, {vocab_size}), found {problem}"
    )


def _check_marks(folder: Folder, ids: np.ndarray) -> None:
    """Raises InputError if t2d, which marks the target's tokens with a row, marks others."""
    path = folder.stored.get("t2d")
    if path is None:
        return
    marked = np.flatnonzero(weights.open_all([path])[path].get_slice("t2d")[...])
    if not np.array_equal(marked, np.sort(ids)):
        raise InputError(
            f"{path}: t2d: expected the {len(ids)} tokens of d2t to be marked, "
            f"found {len(marked)} marked tokens, and others"
        )
