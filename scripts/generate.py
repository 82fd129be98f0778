r"""Continues a text by speculative sampling.

python scripts/generate.py --prompt="def read_json(path):" --show
python scripts/generate.py --file=some.py --config.num_speculative_tokens=6   # auto: by itself
python scripts/generate.py --prompt="import os" --config.sampling.temperature=0 --json
python scripts/generate.py --prompts=prompts.txt --config.mesh.data=4   # one per line, in one batch
python scripts/generate.py --target=FOLDER --draft=FOLDER --prompt="Who are you?" --chat
python scripts/generate.py --target=FOLDER --config=configs/experiments/answers.py \
    --prompts=questions.jsonl --answers=runs/answers   # to train on; the same command resumes
python scripts/generate.py --prompt="import os" --config.mesh.model=0   # on all devices
python scripts/generate.py --prompt="import os" --config.mesh.model=0 --distributed   # of a pod

Every key of the config is a flag; configs/experiments/generate.py lists them.
"""

import dataclasses
import json
import pathlib
import sys

import _environment  # must be first: names a package that is missing
from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax.cli import configs, main, terminal
from spsjax.utils import from_config

_CONFIG = config_flags.DEFINE_config_file("config", None, "How to generate.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)
_PROMPT = flags.DEFINE_string("prompt", None, "The text to continue.")
_FILE = flags.DEFINE_string("file", None, "File with the text; - is the standard input.")
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "File with one prompt per line; prints a JSON object per prompt."
)
_ANSWERS = flags.DEFINE_string(
    "answers",
    None,
    "Folder for the target's answers to --prompts, then a file, folder or pattern of JSON lines.",
)
_CHAT = flags.DEFINE_bool("chat", False, "Treat a prompt as a chat message, and print the answer.")
_SHOW = flags.DEFINE_bool("show", False, "Colour accepted draft tokens and the target's own.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.")


def run():
    config = _CONFIG.value
    configs.choose_pair(config, _TARGET.value, _DRAFT.value)
    prompts = read_prompts() if _ANSWERS.value is None else []
    options = {
        "sampling": from_config.build_section("sampling", spsjax.SamplingParams, config.sampling),
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "verifier": verifier(config),
        "stop_at_eos": config.stop_at_eos,
    }
    mesh = configs.mesh(config.mesh)
    target = spsjax.load(config.target, mesh, config.dtype, quantize=config.quantize)
    if target.tokenizer is None:
        raise spsjax.InputError(f"{target.name}: expected a tokenizer, found none")
    drafter = configs.load_drafter(config.drafter, config.draft, config, target, config.dtype)
    drafter = configs.with_tree(drafter, target, config.tree)
    drafter = configs.with_stop_rule(drafter, target, config.stop_rule)
    count = configs.draft_length(config.num_speculative_tokens)
    if _ANSWERS.value is not None:
        write_answers(config, target, drafter, count, options)
        return
    inputs = prompts
    if _CHAT.value:
        inputs = [target.tokenizer.chat([{"role": "user", "content": text}]) for text in prompts]
    if not _JSON.value and _PROMPTS.value is None:
        shown = f"{prompts[0]}\n\n" if _CHAT.value else prompts[0]
        stats = terminal.stream(
            target, inputs[0], shown, drafter, count, colour=_SHOW.value, **options
        )
        terminal.note(str(stats))
        return
    out = spsjax.generate(target, inputs, drafter, count, **options)
    results = [
        {"prompt": prompt, "text": text, "tokens": tokens.tolist()}
        for prompt, text, tokens in zip(prompts, out.texts, out.tokens)
    ]
    if _PROMPTS.value is not None:
        terminal.note(
            f"{len(prompts)} texts in {out.stats.target_calls} target calls; "
            f"{out.stats.block_efficiency:.2f} tokens per call"
        )
    else:
        results[0] |= {"stats": dataclasses.asdict(out.stats), "config": config.to_dict()}
    for result in results:
        print(json.dumps(result))


def write_answers(config, target, drafter, count, options) -> None:
    """Writes the target's answers to questions, for training; see `spsjax.training.answers`."""
    # Imported here, because it loads the data pipeline, which other texts do not need.
    from spsjax.training import answers

    for flag in (_PROMPT, _FILE, _CHAT, _SHOW, _JSON):
        if flag.present:
            raise spsjax.InputError(f"--{flag.name}: expected none with --answers, found one")
    if not _PROMPTS.value:
        raise spsjax.InputError("--prompts: expected JSON lines with --answers, found none")
    if not config.stop_at_eos:
        raise spsjax.InputError("stop_at_eos: expected True with --answers, found False")
    sampling = answers.Sampling(options["sampling"], config.max_new_tokens, config.seed)
    sizes = from_config.build_section("answers", answers.AnswersConfig, config.answers)
    files = _PROMPTS.value, _ANSWERS.value
    answers.write(target, drafter, count, *files, sizes, sampling, options["verifier"])


def verifier(config) -> spsjax.verifiers.Verifier | str | None:
    """Returns the rule of acceptance that a config names."""
    if config.lenience == 1:
        return config.verifier or None
    if config.verifier not in ("", "rejection"):
        raise spsjax.InputError(
            f"lenience: expected 1 with another rule than rejection, found {config.lenience}"
        )
    return spsjax.verifiers.rejection.Verifier(config.lenience)


def read_prompts() -> list[str]:
    """Returns the prompts, from the one flag that is set."""
    used = [flag for flag in (_PROMPT, _FILE, _PROMPTS) if flag.value is not None]
    if len(used) != 1:
        raise spsjax.InputError("--prompt, --file, --prompts: expected one of the three")
    for flag in (_SHOW, _JSON):
        if used[0] is _PROMPTS and flag.value:
            raise spsjax.InputError(f"--{flag.name}: expected one text, found --prompts")
    name, text = f"--{used[0].name}", used[0].value
    if used[0] is not _PROMPT:
        name = f"{name} {text}"
        try:
            raw = sys.stdin.buffer.read() if text == "-" else pathlib.Path(text).read_bytes()
            text = raw.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise spsjax.InputError(f"{name}: expected a text in UTF-8, found {error}") from None
    prompts = {name: text}
    if used[0] is _PROMPTS:
        lines = text.removesuffix("\n").split("\n")
        prompts = {f"{name}, line {n}": line.removesuffix("\r") for n, line in enumerate(lines, 1)}
    for name, prompt in prompts.items():
        if not prompt:
            raise spsjax.InputError(f"{name}: expected a text, found an empty one")
    return list(prompts.values())


if __name__ == "__main__":
    main.run(run, _environment.EXPERIMENTS / "generate.py")
