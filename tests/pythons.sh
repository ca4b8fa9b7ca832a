#!/usr/bin/env bash
# Runs the Python tests on each of several versions of Python. One that is not installed is a failure.
# Usage: tests/pythons.sh 3.10 3.12 -- [arguments for pytest]. Ends with a line for each version.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

versions=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    versions+=("$1")
    shift
done
shift

# The interpreter of a version, also where pyenv has it but has not chosen it.
find_python() {
    local found is_it='import sys; sys.exit(sys.argv[1] != "%d.%d" % sys.version_info[:2])'
    for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$found" -c "$is_it" "$1" 2>/dev/null; then
            command -v "$found"
            return
        fi
    done
    return 1
}

failed=0
summary=()
for version in "${versions[@]}"; do
    if ! python=$(find_python "$version"); then
        summary+=("$version: NOT INSTALLED")
        failed=1
    elif make PYTHON="$python" VENV=".venv-$version" pytest ARGS="$*"; then
        summary+=("$version: passed")
    else
        summary+=("$version: FAILED")
        failed=1
    fi
done
printf '%s\n' "${summary[@]}"
exit $failed
