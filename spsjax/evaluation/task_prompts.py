"""Prompts of tasks, for comparisons in which answers are timed and not scored."""

from collections.abc import Sequence

from spsjax.errors import InputError
from spsjax.evaluation import paper, runner, samplers
from spsjax.loading import Model


def by_group(
    config, names: Sequence[str], target: Model, count: int, new_tokens: int
) -> dict[str, dict[str, list[int]]]:
    """Returns token ids of prompts by task and name; tasks with groups have one entry per group.

    Prompts are first turns that leave room for the new tokens, the first ones of each group.

    Args:
        config: config whose `tasks` holds the fields of the tasks.
        names: tasks.
        target: target model.
        count: prompts of each group.
        new_tokens: tokens that follow a prompt.

    Raises:
        InputError: a task is unknown, has no file, or no prompt that fits.
    """
    tasks = paper.load_tasks(config, names)
    for name in names:
        if name not in tasks:
            raise InputError(f"tasks.{name}.path: expected a file, found none")
    systems, plan = [samplers.spsjax_system("ArS", target)], runner.Plan(new_tokens=new_tokens)
    found = {}
    for name, task in tasks.items():
        for example in runner.select_examples(task, target, systems, plan).examples:
            group = f"{name}: {example.group}" if example.group else name
            prompts = found.setdefault(group, {})
            if len(prompts) < count:
                prompts[example.name] = runner.prompt_ids(target, task, example.turns[:1], ())
    return found
