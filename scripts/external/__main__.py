"""`python -m external`, as scripts/external.sh runs it."""

import sys

from external.driver import main

sys.exit(main(sys.argv[1:]))
