"""Shows a text of autoregressive and of speculative sampling, and measures their speed.

bash scripts/quickstart.sh    # creates an environment and runs this file
bash scripts/quickstart.sh --target=smollm2 --prompt="Why is the sky blue?"    # a chat model

A target with a chat template answers a question. Another one continues a text, with the fastest K
of a trial. A public model that is missing is downloaded.

Every key of the config is a flag; configs/experiments/quickstart.py lists them.
"""

import _environment  # must be first: names a package that is missing
from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax import loading
from spsjax.cli import configs, demonstration, main, terminal
from spsjax.errors import check_integer
from spsjax.models import transformer

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to show.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)
_PROMPT = flags.DEFINE_string("prompt", None, "Question for a chat model, or text to continue.")


def run():
    config, target, draft, prompt = _CONFIG.value, _TARGET.value, _DRAFT.value, _PROMPT.value
    check_integer("prompts", config.prompts, 1)
    check_integer("chat.repetitions", config.chat.repetitions, 1)
    if config.preview not in config.run_settings:
        known = ", ".join(config.run_settings)
        raise spsjax.InputError(f"preview: expected one of {known}, found {config.preview}")
    try:
        loading.fetch(target or config.target)
    except spsjax.InputError as error:
        terminal.note(f"{error}. The shipped pair is shown instead.")
        target, draft, prompt = "pystdlib/target", "pystdlib/draft", None
    configs.choose_pair(config, target, draft)
    target = spsjax.load(config.target, dtype=config.dtype)
    draft = configs.load_drafter("model", config.draft, config, target, config.dtype)
    for model in (model for model in (target, draft) if model.params):
        print(f"{model.name}: {transformer.num_params(model.params) / 1e6:.1f}M parameters")
    if target.tokenizer is None:
        raise spsjax.InputError(f"{target.name}: expected a tokenizer, found none")
    if target.tokenizer.has_template:
        config.chat.question = prompt or config.chat.question
        demonstration.answer(config, target, draft)
    else:
        config.prompt = prompt or config.prompt
        demonstration.continuation(config, target, draft)
    print("Tests of exactness: bash scripts/test.sh")


if __name__ == "__main__":
    main.run(run, _environment.EXPERIMENTS / "quickstart.py")
