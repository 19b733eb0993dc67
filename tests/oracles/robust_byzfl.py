# pyright: reportMissingImports=false  (byzfl lives in an environment of its own)
"""Makes robust_byzfl.json, which tests/test_robust.py reads: what byzfl 0.0.11 makes of drawn uploads by its rules.

byzfl needs torch, so it has an environment of its own and is no dependency of the tests:

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 numpy scipy && ENV/bin/pip install --no-deps byzfl==0.0.11
    ENV/bin/python tests/oracles/robust_byzfl.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np

package, spec = types.ModuleType("byzfl"), importlib.util.find_spec("byzfl")  # without its benchmarks and their data
assert spec is not None
package.__path__ = list(spec.submodule_search_locations or ())
sys.modules["byzfl"] = package

from byzfl.aggregators.aggregators import Average, CenteredClipping, GeometricMedian, Krum, Median, MultiKrum, TrMean  # noqa: E402
from byzfl.aggregators.preaggregators import NNM, Clipping  # noqa: E402

M, D, F = 13, 6, 3


def main() -> None:
    drawn = np.random.default_rng(14)
    rows = drawn.normal(size=(M, D)) + 0.5
    rows[:F] = 40 + drawn.normal(size=(F, D))
    rules = {
        "mean": Average(),
        "median": Median(),
        "trimmed-mean": TrMean(F),
        # byzfl sums over the M - f - 1 nearest others, and Blanchard et al. over M - f - 2: its f is one more
        "krum": Krum(F + 1),
        "multi-krum": MultiKrum(F + 1),
        "nnm": NNM(F),
        "geometric-median": GeometricMedian(nu=0.1, T=3),
        "centred-clipping": CenteredClipping(L=3, tau=2.5),
        "clipping": Clipping(2.5),
    }
    found = {name: np.asarray(rule(rows.copy())).tolist() for name, rule in rules.items()}
    found["nnm-median"] = np.asarray(Median()(NNM(F)(rows.copy()))).tolist()
    found["nnm-trimmed-mean"] = np.asarray(TrMean(F)(NNM(F)(rows.copy()))).tolist()
    told = {"f": F, "rows": rows.tolist(), "found": found}
    Path(__file__).with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
