"""MQTT: one line of NDJSON for each message of a topic. Needs `pip install paho-mqtt`.

    python mqtt.py --host broker.local --topic home/motion | crowdml join URL CODE --source ndjson:-

A message is JSON: {"x": [...], "y": "label"}. What is no such thing is passed on, and skipped and counted by `join`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def line_of(payload: bytes) -> str:
    """A message as one line, whatever it holds."""
    try:
        return json.dumps(json.loads(payload))
    except (ValueError, RecursionError):
        return "null"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--host", default="localhost")
    options.add_argument("--port", type=int, default=1883)
    options.add_argument("--topic", required=True)
    options.add_argument("--username")
    options.add_argument("--password-file", help="a file that holds the password alone")
    chosen = options.parse_args()
    try:
        from paho.mqtt import client as mqtt
    except ImportError:
        sys.exit("paho-mqtt is not installed; run `pip install paho-mqtt`.")

    def connected(client: Any, *_: Any) -> None:
        client.subscribe(chosen.topic, qos=1)  # again after every reconnection

    def heard(_: Any, __: Any, message: Any) -> None:
        print(line_of(message.payload), flush=True)

    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    if chosen.username:
        with open(chosen.password_file, encoding="utf-8") as file:
            client.username_pw_set(chosen.username, file.read().strip())
    client.on_connect, client.on_message = connected, heard
    client.connect(chosen.host, chosen.port)
    client.loop_forever(retry_first_connection=True)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
