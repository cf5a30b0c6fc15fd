"""Starts a module of the copy of this program that holds this file: `python .../start.py MODULE WORD...`.

The copy comes first on the module path, before one that is installed. No variable hands it over: PYTHONPATH
takes no path with a colon, and every process that is started further would have it, too.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
