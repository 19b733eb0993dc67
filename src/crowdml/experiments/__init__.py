"""The papers' figures and our own: one module per paper, and the baselines that they compare with."""
