"""Makes the stand-in environment importable from the tests and from the processes they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
