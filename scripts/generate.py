"""Continues a text by speculative sampling.

python scripts/generate.py --prompt="def read_json(path):" --show
python scripts/generate.py --file=some.py --config.num_speculative_tokens=6
python scripts/generate.py --prompt="import os" --config.sampling.temperature=0 --json
python scripts/generate.py --prompt="import os" --config.mesh.model=0   # over all devices
python scripts/generate.py --prompt="import os" --config.mesh.model=0 --distributed   # of a pod

Every key of the config is a flag; configs/experiments/generate.py lists them.
"""

import dataclasses
import json
import pathlib
import sys

import display
from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax import arguments, cli

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "How to generate.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")
_PROMPT = flags.DEFINE_string("prompt", None, "The text to continue.")
_FILE = flags.DEFINE_string("file", None, "Where to read it instead; - is the standard input.")
_SHOW = flags.DEFINE_bool("show", False, "Colour what was drafted and what was not.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.")


def main():
    config = _CONFIG.value
    config.target, config.draft = _TARGET.value or config.target, _DRAFT.value or config.draft
    prompt = read_prompt()
    options = {
        "sampling": arguments.build("sampling", spsjax.SamplingParams, config.sampling),
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "lenience": config.lenience,
        "stop_at_eos": config.stop_at_eos,
    }
    mesh = cli.mesh(config.mesh)
    target = spsjax.load(config.target, mesh, config.dtype)
    if target.tokenizer is None:
        raise spsjax.InputError(f"{target.name}: expected a tokenizer.model, found none")
    drafter = cli.load_drafter(config.drafter, config.draft, config, config.dtype, mesh)
    count = None if drafter is None else config.num_speculative_tokens
    if not _JSON.value:
        figures = display.stream(target, prompt, drafter, count, colour=_SHOW.value, **options)
        display.note(str(figures))
        return
    out = spsjax.generate(target, [prompt], drafter, count, **options)
    result = {
        "prompt": prompt,
        "text": out.texts[0],
        "tokens": out.tokens[0].tolist(),
        "stats": dataclasses.asdict(out.stats),
        "config": config.to_dict(),
    }
    print(json.dumps(result))


def read_prompt() -> str:
    """The prompt, from the one flag that gives it."""
    if (_PROMPT.value is None) == (_FILE.value is None):
        raise spsjax.InputError("--prompt, --file: expected one of the two")
    if _PROMPT.value is not None:
        name, prompt = "--prompt", _PROMPT.value
    else:
        name, source = f"--file {_FILE.value}", pathlib.Path(_FILE.value)
        try:
            raw = sys.stdin.buffer.read() if _FILE.value == "-" else source.read_bytes()
            prompt = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise spsjax.InputError(f"{name}: expected a text in UTF-8, found {error}") from None
    if not prompt:
        raise spsjax.InputError(f"{name}: expected a text, found an empty one")
    return prompt


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "generate.py")
