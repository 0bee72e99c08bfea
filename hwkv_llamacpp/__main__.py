"""`python -m hwkv_llamacpp`: the hwkv command."""

import sys

from .cli.main import main

sys.exit(main())
