"""Checks of the fields of `models.config.Config` that depend on each other."""

import dataclasses
from collections.abc import Collection
from typing import Any

from spsjax.errors import InputError, short_repr


def check_changes(config: Any, of_model: Collection[str]) -> None:
    """Raises InputError unless `changes` gives valid configs of layers.

    `of_model` are the fields that all layers share.
    """
    known = {field.name for field in dataclasses.fields(config)}.difference(of_model)
    for index, change in enumerate(config.changes):
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in change):
            raise InputError(f"changes: expected (name, value) pairs, found {short_repr(change)}")
        for name, _ in change:
            if name not in known:
                raise InputError(
                    f"changes: layer {index}: expected fields of a layer, found {short_repr(name)}"
                )
        config.layer(index)
    layers = range(config.num_layers)
    if config.changes and all(config.layer(layer).is_recurrent for layer in layers):
        raise InputError("changes: expected a layer with keys and values, found none")


def check_groups(config: Any) -> None:
    """Raises InputError unless a token's groups of experts have enough experts."""
    count, kept = config.expert_groups, config.groups_per_token
    if config.num_experts and (count < 1 or config.num_experts % count):
        raise InputError(
            f"expert_groups: expected a divisor of num_experts={config.num_experts}, found {count}"
        )
    inside = config.num_experts // count * kept if 1 <= kept <= count else 0
    if config.num_experts and inside < config.experts_per_token:
        raise InputError(
            f"groups_per_token: expected 1 to expert_groups={count}, with at least "
            f"experts_per_token={config.experts_per_token} experts, found {kept}"
        )


def check_rotary(config: Any) -> None:
    """Raises InputError unless the sizes of rotary positions and of latent attention fit."""
    latent = config.mixer == "latent"
    # Latent attention rotates a part of each head only, and a gated delta net nothing.
    is_any = latent or config.mixer == "delta"
    if config.head_dim < 1 or (config.head_dim % 2 and not is_any):
        expected = "a positive number" if is_any else "an even number"
        raise InputError(f"head_dim: expected {expected}, found {config.head_dim}")
    if config.rotary_dim not in range(2 * latent, config.head_dim + 1 - latent, 2):
        raise InputError(
            f"rotary_dim: expected an even number within head_dim={config.head_dim}, "
            f"found {config.rotary_dim}"
        )
    if latent and (config.latent_rank < 1 or config.value_dim < 1 or config.num_kv_heads != 1):
        raise InputError(
            "latent_rank, value_dim, num_kv_heads: expected positive sizes and one head, found "
            f"{config.latent_rank}, {config.value_dim} and {config.num_kv_heads}"
        )


def check_delta(config: Any) -> None:
    """Raises InputError unless a gated delta net has its sizes, and a cache of its kind."""
    if config.mixer == "delta" and (config.value_dim < 1 or config.delta_taps < 1):
        raise InputError(
            "value_dim, delta_taps: expected positive sizes, found "
            f"{config.value_dim} and {config.delta_taps}"
        )
    if config.recent and config.is_recurrent:
        raise InputError(
            "recent: expected 0 in a model with recurrent layers, whose states no window limits, "
            f"found {config.recent}"
        )


def refuse_recurrent(name: str, config: Any) -> None:
    """Raises InputError if a model has recurrent layers, where lengths are reduced."""
    if config.is_recurrent:
        raise InputError(
            f"{name}: expected a model without recurrent layers, whose states cannot be cut back, "
            'found one with gated delta nets ("linear_attention")'
        )
