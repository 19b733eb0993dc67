"""The simulator: an exact event queue and a compiled engine that run the same handlers over the same schedule."""
