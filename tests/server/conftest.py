"""Where the tests of the server find what they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from real_postgresql import postgresql, postgresql_url  # noqa: F401  fixtures
