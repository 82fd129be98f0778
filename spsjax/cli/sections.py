"""Sections that the configs of many experiments share."""

import dataclasses

from ml_collections import config_dict

from spsjax.data.documents import Sources


def pair() -> dict:
    """Returns the shipped pair and its compute type."""
    return {"target": "pystdlib/target", "draft": "pystdlib/draft"} | dtype()


def dtype() -> dict:
    """Returns the compute type; None: the device's default."""
    return {"dtype": config_dict.placeholder(str)}


def quantize() -> dict:
    """Returns the type of the target's matrices: int8 or int8_dynamic; None: the compute type."""
    return {"quantize": config_dict.placeholder(str)}


def mesh(**more: int) -> dict:
    """Returns the numbers of devices; model = 0: all devices. `more` has further axes."""
    return {"mesh": {"data": 1, "model": 1} | more}


def sampling(temperature: float = 1.0, top_p: float = 1.0) -> dict:
    """Returns sampling parameters without top-k and min-p."""
    return {"temperature": temperature, "top_k": 0, "top_p": top_p, "min_p": 0.0}


def settings(*run: str, **more: dict) -> dict:
    """Returns sampling settings by name, those to run and `more`."""
    known = {
        "sampled": sampling(),
        "nucleus": sampling(0.8, 0.95),
        "cold": sampling(0.3),
        "greedy": sampling(0.0),
    }
    return {"run_settings": run, "settings": {name: known[name] for name in run} | more}


def prompts(count: int = 8, tokens: int = 100, new_tokens: int = 128) -> dict:
    """Returns prompts: the beginnings of held-out documents of the standard library."""
    return {
        "data": dataclasses.asdict(Sources()),
        "texts": (),  # texts that replace them, for a target with a tokenizer
        "prompts": count,
        "prompt_tokens": tokens,
        "max_new_tokens": new_tokens,
        "seed": 0,
    }


def ngram(num_speculative_tokens: int) -> dict:
    """Returns the options of prompt lookup, which is not measured without draft tokens."""
    options = {"max_ngram": 3, "min_ngram": 1}
    return {"ngram": {"num_speculative_tokens": num_speculative_tokens} | options}


def drafters() -> dict:
    """Returns the options of drafters without weights, by the name of their module."""
    return {
        "ngram": {"max_ngram": 3, "min_ngram": 1},
        "suffix": {"num_tree_tokens": 0, "max_match": 64, "factor": 1.0, "min_prob": 0.1},
        "copy": {
            # start: index of the first token; None: after the tokenizer's first tokens.
            "start": config_dict.placeholder(int),
            "max_suffix": 3,
            "replaces": True,
        },
        "lookahead": {"window": 15, "num_guesses": 15, "pool": 1024, "follow": False},
    }


def peer(*counts: int, dtypes: tuple[str, ...] = ("float32",)) -> dict:
    """Returns the values of K of assisted generation, and the types of other libraries."""
    return {"peer": {"num_speculative_tokens": counts, "dtypes": dtypes}}
