"""Where tests find what they share: the bench for conversations, and the statistics of noise."""

import sys
from pathlib import Path

for folder in ("conversations", "privacy", "secagg"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
