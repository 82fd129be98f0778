# Sourced by the other scripts: makes the virtual environment where there is none, installs the
# package and its extra `test` into it, goes to the repository's root, and sets VENV.
# PYTHON chooses the interpreter (3.11 or later); one of another version than .venv's gets a folder
# of its own, such as .venv-3.13. Without PYTHON it is .venv's or, where there is none, the newest
# of 3.14 to 3.12, else python3. Nothing is installed again until setup.py changes.

version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

newest_python() {
  local version candidate candidates root
  root=$(pyenv root 2>/dev/null)
  for version in 3.14 3.13 3.12; do
    candidates=("python$version")
    [ -z "$root" ] || candidates+=("$root/versions/$version".*/bin/"python$version")
    for candidate in "${candidates[@]}"; do
      [ "$(version_of "$candidate")" != "$version" ] || { echo "$candidate" && return; }
    done
  done
  echo python3
}

find_python() {
  local python=${PYTHON:-} own found
  own=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
  CHOICE="as PYTHON says"
  if [ -z "$python" ] && [ -n "$(version_of "$own")" ]; then
    python=$own
  elif [ -z "$python" ]; then
    # From 3.12 on there are newer versions of JAX, which are faster in bfloat16 on some CPUs.
    CHOICE="the newest here for which there is a JAX; PYTHON=... chooses another"
    python=$(newest_python)
  fi
  found=$("$python" -c '
import sys
print("%d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable))
' 2>/dev/null) || { echo "PYTHON: expected a Python interpreter, found '$python'" >&2; return 1; }
  PYTHON_VERSION=${found%% *} PYTHON_PATH=${found#* }
  "$PYTHON_PATH" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "PYTHON: expected version 3.11 or later, found $PYTHON_VERSION ($PYTHON_PATH)" >&2
    return 1
  }
}

make_venv() {
  "$PYTHON_PATH" -m venv --clear "$VENV" >/dev/null 2>&1 && return
  # Some systems leave out the part of venv that brings pip; an installed pip can do its work.
  "$PYTHON_PATH" -m venv --clear --without-pip "$VENV" &&
    "$PYTHON_PATH" -m pip --python "$VENV/bin/python" install --quiet pip
}

setup_venv() {
  local stamp wanted start=$SECONDS
  find_python || return
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || return
  VENV=$PWD/.venv
  if [ -e "$VENV" ] && [ "$(version_of "$VENV/bin/python")" != "$PYTHON_VERSION" ]; then
    # An interpreter that is gone leaves a broken folder, which is made anew; a working one is kept.
    [ -z "$(version_of "$VENV/bin/python")" ] || VENV=$PWD/.venv-$PYTHON_VERSION
  fi
  [ "$(version_of "$VENV/bin/python")" = "$PYTHON_VERSION" ] || {
    echo "Making ${VENV##*/} with Python $PYTHON_VERSION ($PYTHON_PATH): $CHOICE"
    make_venv || return
  }
  stamp=$VENV/spsjax-installed
  wanted=$("$VENV/bin/python" -c '
import hashlib, pathlib, sys
print(sys.version, pathlib.Path.cwd(), hashlib.sha256(open("setup.py", "rb").read()).hexdigest())
') || return
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing into ${VENV##*/} (a minute or two)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
      --editable '.[test]' || return
    printf '%s\n' "$wanted" >"$stamp"
    echo "Installed in $((SECONDS - start)) s"
  fi
}

setup_venv || exit
