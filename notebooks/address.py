"""Writes the address of a repository on GitHub into all notebooks, with a badge that opens Colab.

python notebooks/address.py https://github.com/OWNER/NAME
"""

import json
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
_BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"


def with_address(name: str, notebook: dict, address: str) -> dict:
    """Returns a notebook that installs from `address`, with a badge below its title.

    Args:
        name: name of its file.
        notebook: its content.
        address: `https://github.com/OWNER/NAME`.
    """
    place = address.removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}"
    title = next(cell for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    lines = [line for line in title["source"] if not line.startswith(_BADGE)]
    title["source"] = [lines[0], f"{_BADGE}({colab})\n", *lines[1:]]
    code = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    setting = re.compile(r'^REPOSITORY = ".*"')
    code["source"] = [setting.sub(f'REPOSITORY = "{address}"', line) for line in code["source"]]
    return notebook


def main(arguments: list[str]) -> str:
    """Returns an error in one line, or "" after all notebooks are written."""
    pattern = r"https://github\.com/[\w.-]+/[\w.-]+"
    if len(arguments) != 1 or not re.fullmatch(pattern, arguments[0]):
        found = " ".join(arguments) or "nothing"
        return f"error: expected an address such as https://github.com/OWNER/NAME, found {found}"
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = with_address(path.name, json.loads(path.read_text("utf-8")), arguments[0])
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or None)
