# Sourced by the other tools: makes .venv with Python 3.12 and everything pinned, once, and puts it on PATH.
# Nothing is installed again while pyproject.toml, the constraints and the Python are the same.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

ckptguard_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    if command -v pyenv >/dev/null; then
        candidate=$(pyenv versions --bare 2>/dev/null | grep -E '^3\.12\.[0-9]+$' | sort -V | tail -n 1)
        [ -n "$candidate" ] && candidate="$(pyenv prefix "$candidate")/bin/python3.12"
        if [ -x "$candidate" ]; then echo "$candidate"; return; fi
    fi
    if command -v uv >/dev/null && candidate=$(uv python find 3.12 2>/dev/null || { uv python install -q 3.12 && uv python find 3.12; }); then
        echo "$candidate"
        return
    fi
    echo "Python 3.12 is needed and was not found: not as \$PYTHON or python3.12, nor with pyenv or uv." >&2
    echo "Install it, or name it: PYTHON=/path/to/python3.12 $0" >&2
    return 1
}

ckptguard_setup() {
    local python stamp
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=$(ckptguard_python) || return 2; fi
    stamp=$(cat pyproject.toml tools/constraints.txt ckptguard/fingerprint/words.c | sha256sum | cut -c1-64)
    if [ "$(cat .venv/ckptguard-stamp 2>/dev/null)" != "$stamp" ]; then
        echo "setting up .venv (a few minutes the first time)" >&2
        [ -x .venv/bin/python ] || "$python" -m venv .venv || return 6
        if ! .venv/bin/python -m pip install -q --disable-pip-version-check -c tools/constraints.txt --config-settings editable_mode=compat -e '.[dev]' >.venv/setup.log 2>&1; then
            cat .venv/setup.log >&2
            return 6
        fi
        # Without its dependencies: some of them cannot be built without CUDA, and the models need none of those.
        if ! .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps -c tools/constraints.txt megatron-bridge >>.venv/setup.log 2>&1; then
            cat .venv/setup.log >&2
            return 6
        fi
        echo "$stamp" >.venv/ckptguard-stamp
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    export VIRTUAL_ENV="$PWD/.venv"
    unset PYTHONHOME PYTHONPATH
}

ckptguard_setup || exit $?
