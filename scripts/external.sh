#!/usr/bin/env bash
# Programs and tests that others wrote judge attnscope, each in an environment of its own that is deleted after. By
# hand, not in .ci/run: it installs other packages and takes from minutes to an hour. docs/external.md is made of it, and
# a column of docs/coming-from.md.
#
#   scripts/external.sh                               # every judge
#   scripts/external.sh NAME --source NAME=FOLDER     # one, which needs a folder that no package has
#   scripts/external.sh --docs                        # both pages again, from the results that are kept
#   PYTHON=python3.12 scripts/external.sh NAME        # another Python, which must have attnscope installed
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=scripts exec "${PYTHON:-python}" -m external "$@"
