#!/usr/bin/env bash
# Builds everything; see ./build.sh --help. Needs python3 (3.10+, with venv), a C++17 compiler and git.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

fail() { echo "error: $1" >&2; exit 1; }

python="${PYTHON:-python3}"
command -v "$python" >/dev/null || fail "$python not found: install Python 3.10 or newer (Debian: apt install python3 python3-venv)."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || fail "$("$python" --version 2>&1) is too old: Python 3.10 or newer is needed (set PYTHON to another one)."

exec "$python" "$here/scripts/build.py" "$@"
