"""Lets the tests of the runtime import their helpers, and keeps torch from starting threads."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: forked ranks inherit its pool
sys.path.insert(0, str(Path(__file__).parent))
