"""Server that `command_line.Script` forks scripts from: it has imported what they import.

Importing takes most of a short script's time. Nothing here may ask JAX for devices: they would not
survive the fork.
"""

import atexit
import contextlib
import gc
import os
import resource
import runpy
import sys

import spsjax.benchmarks.paper
import spsjax.benchmarks.peers.hf
import spsjax.cli.main
import spsjax.cli.terminal
import spsjax.planning.aot
import spsjax.training.fit

with contextlib.suppress(ImportError):
    import spsjax.cli.comparison_plots  # noqa: F401
gc.freeze()  # imported modules never become garbage


def run(arguments, environment, folder, file_kib, output) -> None:
    """Runs a script in this forked process, as a new Python process would run it.

    `command_line.Script` describes the arguments.
    """
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    if file_kib is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (1024 * file_kib,))
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # `multiprocessing` leaves them out
