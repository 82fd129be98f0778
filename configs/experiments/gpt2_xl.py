r"""GPT-2 XL with GPT-2 small as its draft: 256 tokens after a prompt of 10, greedy, K = 4.

python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py \
    --target=hf://openai-community/gpt2-xl --draft=hf://openai-community/gpt2
python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --target=FOLDER --draft=FOLDER
python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --random   # times alone

The setting is that of toyllm (MIT, github.com/ai-glimpse/toyllm), whose article reports 16.82 s ->
7.90 s (2.1 times as fast, r' = 0.8125). The report says whether the text equals that of plain
decoding, and which speed-up the cost breakdown predicts. With random weights the draft is never
accepted, so the report has the times alone.
Hardware: any with 7 GB of memory, in float32.
Figures, on two CPU cores with --random, 64 new tokens and one repetition: a pass of the target
takes 299 ms, a draft step 23 ms, and a round 630 ms (docs/archive/0.1_epyc_zen4_float32.md).
"""

from spsjax.cli import sections

get_config = sections.changed(
    __file__,
    "benchmark.py",
    target="gpt2:xl",  # a shape of configs/models, for --random only
    draft="gpt2:small",
    run_settings=("greedy",),
    num_speculative_tokens=(4,),
    ngram={"num_speculative_tokens": 0},
    texts=("Alan Turing theorized that computers would one day become",),
    prompts=1,  # random tokens, with --random
    prompt_tokens=10,
    max_new_tokens=256,
    repetitions=2,
    peer={"num_speculative_tokens": (4,), "dtypes": ("float32",)},
)
