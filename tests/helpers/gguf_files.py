"""GGUF files of tiny models, written with the library `gguf` from folders of the same models.

Names, the order of rows and constants are those of llama.cpp's `convert_hf_to_gguf.py`.
"""

import json
import re

import gguf
import numpy as np
import safetensors.numpy
import sentencepiece

ARCHITECTURES = {"mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "w1": "ffn_gate_exps",
    "w2": "ffn_down_exps",
    "w3": "ffn_up_exps",
    "gate_proj": "ffn_gate_exps",
    "down_proj": "ffn_down_exps",
    "up_proj": "ffn_up_exps",
}
_NUMBERS = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
_KINDS = _NUMBERS | {
    bool: gguf.GGUFValueType.BOOL,
    str: gguf.GGUFValueType.STRING,
    list: gguf.GGUFValueType.ARRAY,
}


def stored_name(name: str, gemma: bool) -> str:
    """Returns llama.cpp's name of a tensor; experts share one."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    inner, _, suffix = name[layer.end() if layer else 0 :].rpartition(".")
    inner = re.sub(r".*\.experts\.\d+\.", "", inner)
    stored = _NAMES[inner]
    if gemma and inner == "post_attention_layernorm":
        stored = "post_attention_norm"
    return f"blk.{layer[1]}.{stored}.{suffix}" if layer else f"{stored}.{suffix}"


def tensors_of(folder) -> dict[str, np.ndarray]:
    """Returns the tensors of a folder in float32, as a GGUF file has them."""
    raw = json.loads((folder / "config.json").read_text())
    kind, heads = raw["model_type"], raw["num_attention_heads"]
    stored: dict[str, list] = {}
    loaded = safetensors.numpy.load_file(folder / "model.safetensors")
    # By number of the expert, which names do not sort by beyond 9.
    for name in sorted(loaded, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
        tensor = loaded[name].astype(np.float32)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if ARCHITECTURES.get(kind, kind) == "llama" and re.search("[qk]_proj", name):
            groups = heads if "q_proj" in name else raw["num_key_value_heads"]
            halves = tensor.reshape(groups, 2, len(tensor) // groups // 2, -1)
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        post = kind in ("gemma2", "gemma3_text")
        stored.setdefault(stored_name(name, post), []).append((".experts." in name, tensor))
    return {
        name: np.stack([tensor for _, tensor in entries]) if entries[0][0] else entries[0][1]
        for name, entries in stored.items()
    }


def metadata_of(folder) -> dict[str, object]:
    """Returns the metadata of a folder's model, without those of its tokenizer."""
    raw = json.loads((folder / "config.json").read_text())
    kind = raw["model_type"]
    architecture = ARCHITECTURES.get(kind, kind)
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta")}
    rope = rope.get("full_attention", rope)
    values = {
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "block_count": raw["num_hidden_layers"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "attention.key_length": raw.get("head_dim"),
        "attention.sliding_window": raw.get("sliding_window") if "gemma" in kind else None,
        "attn_logit_softcapping": raw.get("attn_logit_softcapping"),
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "expert_count": raw.get("num_local_experts"),
        "expert_used_count": raw.get("num_experts_per_tok"),
        "expert_feed_forward_length": raw.get("moe_intermediate_size"),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        original = "original_max_position_embeddings"
        values["rope.scaling.original_context_length"] = rope.get(original)
    named = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    special = {
        f"tokenizer.ggml.{name}_token_id": raw[f"{name}_token_id"] for name in ("bos", "eos")
    }
    return {"general.architecture": architecture} | named | special


def write(path, metadata, tensors, kind="F32"):
    """Writes a GGUF file, with matrices in a type of ggml, and returns its path.

    A value of None leaves a key or a tensor out. Tensors may also be pairs of bytes and their type.
    """
    writer = gguf.GGUFWriter(path, "none")
    writer.kv_data[0].clear()  # the writer adds the architecture itself
    for key, value in metadata.items():
        if value is not None:
            sub = None
            if isinstance(value, list):
                sub = gguf.GGUFValueType.INT32 if type(value[0]) is int else _KINDS[type(value[0])]
            writer.add_key_value(key, value, _KINDS[type(value)], sub)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        type_ = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(tensor: np.ndarray, kind: str) -> np.ndarray:
    """Returns a matrix after it was quantised and dequantised."""
    type_ = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(tensor, type_), type_)


def of_bpe(tokenizer, pre="gpt-2") -> dict[str, object]:
    """Returns the metadata of a byte-level BPE of two control tokens, which adds the first one."""
    raw = json.loads(tokenizer.files["tokenizer.json"])
    tokens = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]
    ]
    special = [token["id"] for token in raw["added_tokens"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if id in special else 1 for id in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def of_sentencepiece(tokenizer) -> dict[str, object]:
    """Returns the metadata of a SentencePiece tokenizer without a space before a text."""
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(tokenizer.files["tokenizer.model"])
    ids = range(model.vocab_size())
    types = [6 if model.is_byte(id) else 1 for id in ids]
    for id in filter(lambda id: model.is_control(id) or model.is_unknown(id), ids):
        types[id] = 3  # as in Gemma's files, whose unknown token is a control token, too
    # The library does not say which pieces a user defined: those of `tokenization.train`.
    user = {"\n", *("\u2581" * run for run in (2, 4, 8, 12, 16))}
    types = [4 if model.id_to_piece(id) in user else types[id] for id in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            model.id_to_piece(id).replace("\u2581", " " if types[id] == 4 else "\u2581")
            for id in ids
        ],
        "tokenizer.ggml.scores": [model.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": False,
    }
