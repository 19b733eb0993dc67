"""Where the tests with real processes find what they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "device"))
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from real_postgresql import postgresql, postgresql_url  # noqa: F401  fixtures
