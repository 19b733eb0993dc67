"""The whole loop on one machine: a real server process, real devices over HTTP, a kill in the middle, and the proof."""
