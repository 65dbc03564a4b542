"""`python -m transformers_falcon_spec` is `falcon-spec`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.argv[0] = "falcon-spec"  # results files name the command that made them
    sys.exit(main())
