# Sourced by the scripts beside it. Makes the virtual environment if there is none, installs once, and sets ROOT, VENV and BIN.
#
# MINISGL_VENV     another place for the environment (default: .venv in the repository)
# MINISGL_PYTHON   the interpreter that makes it (default: the first Python >= 3.10 found)
#
# Everything here speaks on stderr: stdout belongs to the program that is run afterwards.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${MINISGL_VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
BIN=$VENV/bin

say() { printf 'minisgl: %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${MINISGL_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "no Python >= 3.10 found (looked for: ${MINISGL_PYTHON:-python3, python3.10 to python3.13, python})."
    say "Install one, or name it: MINISGL_PYTHON=/path/to/python3 $0"
    return 1
}

# The stamp stands for all that an installation depends on: when one of these changes, the next script installs again.
wanted_stamp() {
    cat "$ROOT/pyproject.toml" "$ROOT/requirements/cpu.txt" "$ROOT/scripts/_env.sh" |
        "$BIN/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read() + repr(sys.argv[1:] + [sys.version]).encode()).hexdigest())' "$ROOT" "$VENV"
}

is_installed() { [ -s "$VENV/minisgl.stamp" ] && [ "$(wanted_stamp 2>/dev/null)" = "$(cat "$VENV/minisgl.stamp")" ]; }

install() {
    local python quiet=--quiet
    if ! "$BIN/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || return 1
        say "making the virtual environment $VENV with $("$python" --version)"
        "$python" -m venv "$VENV" >&2 || { say "'$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv"; return 1; }
    fi
    if [ -t 2 ]; then quiet=; fi
    say "installing torch and the development tools into $VENV (once; a few minutes on a slow line)"
    rm -f "$VENV/minisgl.stamp"
    # shellcheck disable=SC2086  # $quiet is one word or none
    "$BIN/python" -m pip install $quiet --disable-pip-version-check -r "$ROOT/requirements/cpu.txt" -e "${ROOT}[dev]" >&2 || return 1
    wanted_stamp >"$VENV/minisgl.stamp"
}

# One script installs at a time; whoever waited finds the work done.
ensure_environment() {
    if is_installed; then return; fi
    mkdir -p "$VENV"
    (
        if command -v flock >/dev/null; then flock 9; fi
        if ! is_installed; then install; fi
    ) 9>"$VENV/minisgl.lock"
}

ensure_environment
