"""Speed of a pair over K: autoregressive and speculative sampling, and other libraries."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from spsjax import loading, verifiers
from spsjax.benchmarks import forced_acceptance, peers, report, speed, speed_report
from spsjax.benchmarks.systems import Role, System, spsjax_system
from spsjax.cli import configs, terminal
from spsjax.cli.measurements import plot
from spsjax.errors import InputError, check_number, short_repr
from spsjax.planning import mixtures


def run(
    config,
    workdir: pathlib.Path | None,
    shapes: pathlib.Path,
    random: bool,
    size: str | None,
    peer_names: Sequence[str],
) -> None:
    """Measures a pair and prints its speed; with a folder, writes the results.

    `config` is like configs/experiments/benchmark.py, and `shapes` is the folder of the configs of
    models. With `random`, the models have random weights in the shapes that the config names. With
    a `size` as 90M, only ArS of a random model is measured.
    """
    mark = "random weights" if size or random else ""
    verifier = config.verifier or None
    if config.router_skew and not random:
        raise InputError("router_skew: expected --random beside it, found none")
    if config.forced_acceptance is not None:
        check_number("forced_acceptance", config.forced_acceptance, 0, 1)
        verifier = forced_acceptance.Verifier(config.forced_acceptance)
        if not random:
            raise InputError(
                "forced_acceptance: expected --random beside it, because it makes texts "
                "meaningless, found none"
            )
        mark += f", acceptance forced to {config.forced_acceptance:g}"
    target, draft = models(config, shapes, random, size)
    model = draft if isinstance(draft, loading.Model) else None  # what other libraries can run
    others = peers.systems(peer_names, config.peer, target, model)
    if config.tree:
        others = [tree_system(config, target, draft, verifier), *others]
    if workdir is not None:
        configs.begin(f"Speed of {target.name}", config, workdir)
    progress = terminal.progress("measuring")
    result = speed.speed_benchmark(config, target, draft, others, progress, verifier)
    tables, lines = speed_report.tables(result, mark), speed_report.sentences(result, mark)
    terminal.print_tables(tables)
    print("\n".join(lines))
    if workdir is None:
        return
    weights = mark or "as loaded"
    figures = {"config": config.to_dict(), "weights": weights, **dataclasses.asdict(result)}
    text = "\n".join([report.markdown(table.header, table.rows) for table in tables] + lines)
    draw = plot("plots.speed", result.systems, mark=mark)
    report.write(workdir, report.rounded(figures), f"{text}\n", draw)


def tree_system(config, target, draft, verifier) -> System:
    """Returns speculative sampling with the tree of a config's file."""
    rule = verifiers.by_name(verifier) if isinstance(verifier, str) else verifier
    if rule is not None and not rule.trees:
        raise InputError("tree: expected a verifier for trees beside it, found one for chains")
    drafter = configs.with_tree(draft, target, config.tree)
    tree = drafter.drafter.tree
    name, role = f"SpS, tree of {tree.num_nodes}", Role.ALTERNATIVE
    return spsjax_system(name, target, drafter, tree.depth, role, verifier)


def models(
    config, shapes: pathlib.Path, random: bool, size: str | None
) -> tuple[loading.Model, loading.Model | loading.LoadedDrafter | None]:
    """Returns the target and the drafter, loaded or, both being models, with random weights."""
    mesh = configs.mesh(config.mesh)
    if size and random:
        raise InputError("--size, --random: expected one of the two, found both")
    if size or random:
        names = [config.target, config.draft] if random else []
        drawn = [configs.model_config(name, shapes) for name in names]
        drawn = drawn or [speed.config_of_size(parse_size(size))]
        target, *drafts = (
            loading.random(shape, seed, mesh, config.dtype) for seed, shape in enumerate(drawn)
        )
        if config.router_skew:
            target = mixtures.with_skew(target, config.router_skew)
        target = loading.quantized(target, config.quantize) if config.quantize else target
        return target, drafts[0] if drafts else None
    for flag in ("target", "draft"):
        name = config[flag]
        if name in configs.model_names(shapes) and not pathlib.Path(name).is_dir():
            raise InputError(
                f"--{flag}: expected a model folder, or --random for times alone, "
                f"found {name}, a shape without weights"
            )
    target = loading.load(config.target, mesh, config.dtype, quantize=config.quantize)
    draft = configs.load_drafter("model", config.draft, config, target, config.dtype)
    if config.texts and target.tokenizer is None:
        raise InputError(f"{target.name}: expected a tokenizer for texts, found none")
    return target, draft


def parse_size(text: str) -> int:
    """Returns the number of parameters of a size such as 90M or 0.5B."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([MB])", text, re.IGNORECASE)
    size = int(float(match[1]) * {"M": 10**6, "B": 10**9}[match[2].upper()]) if match else 0
    if not size:
        raise InputError(f"--size: expected a size such as 90M or 0.5B, found {short_repr(text)}")
    return size
