"""A first look: one text by autoregressive and by speculative sampling, and their speed.

bash scripts/quickstart.sh    # or, in an environment that has spsjax: python scripts/quickstart.py
bash scripts/quickstart.sh --target=smollm2 --prompt="Why is the sky blue?"    # a chat model

Hardware: any; meant for a laptop's CPU.
Time: 2 min 11 s on two cores of an AMD EPYC (Zen 4), the installation included.
Figures there: the best speed-up is 1.97 sampled (K = 5) and 2.14 greedy (K = 4). It varies between
hours, and was 1.79 and 1.90 in another run (docs/archive/0.1_epyc_zen4_float32.md).
"""

from spsjax.cli import sections

get_config = sections.config(
    **sections.pair(),
    prompt='class Stack:\n    """Last in, first out."""\n\n    def __init__(self',
    preview="sampled",  # setting of the text that is shown
    **sections.settings("sampled", "greedy", sampled=sections.sampling(0.8, 0.95)),
    num_speculative_tokens=(2, 3, 4, 5, 6, 8, 10),  # of which a trial finds the fastest
    trial_prompts=2,
    **sections.ngram(0),
    time_rounds=False,
    **sections.prompts(4),
    repetitions=3,
    # For a target with a chat template, which is asked one question and has no trial.
    chat={
        "question": "Write a Python function that reverses a list, and explain every line of it.",
        "repetitions": 1,
    },
)
