"""`python -m hwkv_llamacpp`: the hwkv command."""

import sys

from .cli import main

sys.exit(main())
