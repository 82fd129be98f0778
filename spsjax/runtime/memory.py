"""Memory that a call takes, compared with what its devices have before anything is allocated."""

import contextlib
import functools
import os
import pathlib

import jax

from spsjax.decode import Program, prompt
from spsjax.drafters import base
from spsjax.errors import InputError
from spsjax.types import PyTree

_GIB = 2**30


def check(
    arguments: str,
    program: Program,
    params: PyTree,
    rows: int,
    slots: int,
    mesh: jax.sharding.Mesh | None,
) -> None:
    """Raises InputError if weights and caches of a call cannot fit into its devices' memory.

    What is counted is the least that the call takes: temporary arrays come on top.

    Args:
        arguments: names of the arguments that the error tells to lower.
        program, params: static configuration of the loop; parameters of target and drafter.
        rows, slots: rows of the loop, and tokens that each has room for.
        mesh: mesh over which caches are split; None: one device.
    """
    devices = [jax.local_devices()[0]] if mesh is None else list(mesh.devices.flat)
    room = _room(devices)
    if room is None:
        return
    leaves, structure = jax.tree.flatten(params)
    types = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    caches = rows * _bytes_of_row(program, slots, structure, types)
    weights = sum(leaf.nbytes for leaf in leaves)
    if weights + caches > room:
        raise InputError(
            f"{arguments}: expected weights and caches of at most {room / _GIB:.1f} GiB, the "
            f"memory here, found {weights / _GIB:.1f} + {caches / _GIB:.1f} GiB: {rows} rows with "
            f"room for {slots} tokens each. Lower one of them"
        )


@functools.lru_cache(maxsize=64)
def _bytes_of_row(program: Program, slots: int, structure, types) -> int:
    """Returns the bytes of one row's caches, of target and drafter, and of its scores."""
    params = structure.unflatten(jax.ShapeDtypeStruct(*one) for one in types)
    caches = jax.eval_shape(functools.partial(prompt.empty_caches, program, slots, 1), params)
    scores = 4 * (1 + base.num_nodes(program.drafter)) * program.target.vocab_size
    return scores + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


def _room(devices: list) -> int | None:
    """Returns the bytes of all devices together; None: unknown."""
    if devices[0].platform == "cpu":  # those of a process share one memory
        memory = _host_memory()
        return None if memory is None else memory * jax.process_count()
    here = [device for device in devices if device.process_index == jax.process_index()]
    stats = here[0].memory_stats() if here else None
    return None if not stats or "bytes_limit" not in stats else len(devices) * stats["bytes_limit"]


@functools.cache
def _host_memory() -> int | None:
    sizes = []
    with contextlib.suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ValueError, OSError):  # of a container; "max": no limit
        sizes.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=None)
