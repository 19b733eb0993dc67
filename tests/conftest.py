"""Where tests find what they share: the bench for conversations, the statistics of noise, and compiled loops."""

import os
import sys
from pathlib import Path

from hypothesis import settings

for folder in ("conversations", "privacy", "secagg"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# Loops that XLA has compiled are kept for the other processes and for the next run: they are most of the time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# As many examples as find what they are for in seconds; CROWDML_EXAMPLES=1000 for a night.
# Without a deadline: no test needs a quiet machine.
settings.register_profile("ours", max_examples=int(os.environ.get("CROWDML_EXAMPLES", "40")), deadline=None)
settings.load_profile("ours")
