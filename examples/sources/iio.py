"""A Linux IIO accelerometer: one line of NDJSON for each window of 3.2 s, for tasks of kind "accelerometer-spectrum".

    python iio.py --label "on foot" | crowdml join URL CODE --source ndjson:-

Reads `in_accel_{x,y,z}_raw` and their scale at 20 Hz, as the kernel offers them under /sys/bus/iio/devices. Windows do
not overlap: each measurement is in one sample at most. Press Ctrl-C to stop; start it again with another label.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from crowdml.features import spectrum

RATE, LENGTH = 20.0, 64


def find_device(root: Path) -> Path:
    """The first device with three axes of acceleration."""
    for device in sorted(root.glob("iio:device*")):
        if all((device / f"in_accel_{axis}_raw").exists() for axis in "xyz"):
            return device
    sys.exit(f"No accelerometer under {root}. Is its driver loaded? `ls {root}` shows what the kernel knows.")


def scale_of(device: Path, axis: str) -> float:
    """m/s2 for one count: of the axis, or of all axes."""
    for name in (f"in_accel_{axis}_scale", "in_accel_scale"):
        if (device / name).exists():
            return float((device / name).read_text())
    return 1.0


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--path", type=Path, default=Path("/sys/bus/iio/devices"), help="where the devices are")
    options.add_argument("--label", required=True, help="what the owner does meanwhile: a class of the task")
    options.add_argument("--windows", type=int, default=0, help="stop after so many; 0: never")
    options.add_argument("--rate", type=float, default=RATE, help="readings a second")
    chosen = options.parse_args()
    device = find_device(chosen.path)
    scales = np.asarray([scale_of(device, axis) for axis in "xyz"])
    done = 0
    while not chosen.windows or done < chosen.windows:
        window = np.zeros((LENGTH, 3))
        for i in range(LENGTH):
            window[i] = [float((device / f"in_accel_{axis}_raw").read_text()) for axis in "xyz"] * scales
            time.sleep(1 / chosen.rate)
        x = spectrum(window[None])[0]
        print(json.dumps({"x": [round(float(value), 6) for value in x], "y": chosen.label}), flush=True)
        done += 1


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
