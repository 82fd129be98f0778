"""Download of public models: python -m spsjax.cli.fetch smollm2."""

import sys

from spsjax.errors import InputError, did_you_mean, short_repr
from spsjax.loading import public


def main(names: list[str]) -> None:
    """Downloads models by name, if they are missing, and prints their files.

    Without names it prints those that there are. Raises InputError for an unknown name, or if a
    download fails.
    """
    for name in names:
        if name not in public.MODELS:
            raise InputError(
                f"{short_repr(name)}: expected one of {', '.join(public.MODELS)}, found another "
                f"name{did_you_mean(name, public.MODELS)}"
            )
    for name in names:
        print(public.fetch(name))
    if not names:
        for name, model in public.MODELS.items():
            path = public.path_of(name)
            print(f"{name}: {model}; {path if path.is_file() else 'not downloaded'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
