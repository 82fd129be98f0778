r"""Drafters of the shipped target, as chains and as trees, on the same prompts.

python scripts/compare.py --workdir=runs/drafters \
    --drafters=model=pystdlib/draft,EAGLE-3=runs/eagle3/drafter

Hardware: any; meant for an idle machine.
"""

from spsjax.cli import sections

get_config = sections.config(
    compare="drafters",
    target="pystdlib/target",
    **sections.dtype(),
    **sections.quantize(),
    **sections.mesh(),
    chains=(2, 4, 7),  # K
    auto=False,  # whether also chains whose K is chosen in every round
    # Children of every node, level by level, of trees whose tokens are drawn.
    branching=((4, 2, 1, 1),),
    dynamic=((16, 5, 4),),  # nodes, levels and width of trees like EAGLE-2's
    **sections.settings("sampled", "nucleus", "greedy", cold=sections.sampling(0.8)),
    # Prompts are those of these tasks, each a row of its own. Without tasks:
    run_tasks=(),
    stop_at_eos=False,  # whether texts end before `max_new_tokens`
    tasks={  # fields of spsjax/benchmarks/tasks/*.py
        "stdlib": {"lines": 20, "count": 100, "least": 3},
        "edit": {"characters": 500, "count": 100},
        # shots: solved example; path: articles; words: number per article, 0 for all.
        "xsum": {"shots": "", "path": "", "words": 0},
        "human_eval": {"path": ""},
        "spec_bench": {"path": ""},
    },
    **sections.prompts(),
    repetitions=1,
)
