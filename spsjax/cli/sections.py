"""Functions that make a config of its keys, and sections that many configs share."""

import copy
import dataclasses
import pathlib
import runpy
from collections.abc import Callable, Mapping

from ml_collections import ConfigDict, config_dict

from spsjax.data.documents import Sources


def config(**values) -> Callable[[], ConfigDict]:
    """Returns the `get_config` of a file with these keys and values."""
    return lambda: ConfigDict(copy.deepcopy(values))  # placeholders are objects that change


def training(kind: str, **changes) -> Callable[[], ConfigDict]:
    """Returns the `get_config` of a training: the defaults of its options, with changes by key.

    `kind` is what is trained: "target", "draft", or a drafter of "features".
    """

    def get_config() -> ConfigDict:
        # Imported here, because it loads the data pipeline, which most scripts never need.
        from spsjax.training import config as trainings

        kinds = {
            "target": trainings.TargetConfig,
            "draft": trainings.DraftConfig,
            "features": trainings.FeaturesConfig,
        }
        return trainings.default(kinds[kind], **changes)

    return get_config


def changed(file: str, base: str, **changes) -> Callable[[], ConfigDict]:
    """Returns a `get_config`: that of another file in the folder of `file`, with changes by key.

    The changes of a section are a dict.
    """

    def get_config() -> ConfigDict:
        values = names_of(file, base)["get_config"]()
        values.update(changes)
        return values

    return get_config


def family(sizes: Mapping[str, Mapping], **common) -> Callable[[str], ConfigDict]:
    """Returns the `get_config` of models of several sizes: fields of all, and those by size."""
    return lambda size: ConfigDict(common | sizes[size])


def names_of(file: str, other: str) -> dict:
    """Returns what a config file defines, whose path is relative to the folder of `file`."""
    return runpy.run_path(str(pathlib.Path(file).parent / other))


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
    data = dataclasses.asdict(Sources())
    del data["loss"]  # nothing is trained
    return {
        "data": data,
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


def drafts(runs: Mapping[str, dict], start: Mapping, **common) -> dict:
    """Returns a comparison of drafts by name, as changes of pystdlib_draft.py and of `common`."""
    shared = {
        "cache": "",  # folder of the target cache; empty: in the comparison's folder
        "draft_eval": {"prompts": 64, "new_tokens": 96},
        "eval_examples": 128,
    }
    return {
        "compare": "drafts",
        "base": "pystdlib_draft",  # a config in configs/experiments
        "common": shared | common,
        "start": start,  # run from which all others continue; {}: random weights
        "runs": runs,
        "speed": {
            "prompts": 16,  # 0: do not measure speed
            "prompt_tokens": 64,
            "max_new_tokens": 96,
            "repetitions": 2,
            "num_speculative_tokens": 4,
            "temperature": 1.0,
        },
    }
