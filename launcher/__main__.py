"""``python -m launcher`` is the command ``trireme``."""

import sys

from launcher.cli.main import main

sys.exit(main())
