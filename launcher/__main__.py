"""``python -m launcher`` is the command ``trireme``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files are not those that are meant by an import

from launcher.cli.main import main

sys.exit(main())
