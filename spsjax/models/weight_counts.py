"""Numbers of parameters of the models that configs describe."""

from typing import Any


def num_weights(config: Any) -> int:
    """Returns the number of parameters in matrices, without norms, biases and position tables."""
    layers = sum(_of_layer(config.layer(index)) for index in range(config.num_layers))
    inputs = config.layer_inputs * config.num_layers
    inputs *= config.d_model + (config.layer_input_rows or config.vocab_rows)
    tables = 1 if config.tie_embeddings else 2
    return layers + inputs + config.d_model * tables * config.vocab_rows


def _of_layer(config: Any) -> int:
    """Returns the number of parameters in the matrices of a layer, by its own config."""
    H, C, D, V = config.num_heads, config.head_dim, config.d_model, config.value_dim
    projections = 0 if config.mixer == "shared" else 1 if config.value_is_key else 2
    attention = C * ((2 + config.attention_gate) * H + projections * config.num_kv_heads) * D
    if config.mixer == "latent":
        rank, width = config.query_rank or D, config.latent_rank
        query = rank * H * C + config.query_rank * D
        keys = D * (width + config.rotary_dim) + width * H * (C - config.rotary_dim + V)
        attention = query + keys + H * V * D
    elif config.mixer == "delta":
        attention = D * (2 * config.num_kv_heads * C + H * (3 * V + 2))
    shared = config.shared_d_ff if config.num_experts else 0
    ffn = (2 if config.ffn == "gelu" else 3) * (config.d_ff * max(config.num_experts, 1) + shared)
    return attention + D * (ffn + 2 * config.layer_inputs)
