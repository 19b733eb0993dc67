"""What the papers did and we do not ship: forms without a guarantee, and what needs a trusted server. Simulated only.

`admm`, `local_updates` and `proportions` are published forms with what they really cost. `stragglers` has rounds with a
partial barrier. `trusted_mean` and `matrix_noise` keep a guarantee against other devices (observer `DEVICES`).
"""
