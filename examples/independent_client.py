"""A Crowd-ML device written from docs/protocol.md and spec/ alone: it shares no code with the library.

    python independent_client.py URL CODE SAMPLES.csv STATE.json CHECK-INS
    python independent_client.py --check-vectors spec/

It speaks `sgd` with `softmax`. A line of samples is a class number and the features: 2,0.1,0.5,... Each is used once.
Noise: exact samplers (Canonne, Kamath, Steinke 2020) on the system's entropy; no float takes part in a draw.
"""

import contextlib
import json
import math
import os
import secrets
import struct
import sys
import time
from base64 import urlsafe_b64encode
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from urllib.request import HTTPError, Request, urlopen

import msgpack
import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def pack(plain):
    return msgpack.packb({key: plain[key] for key in sorted(plain)})


class Key:
    def __init__(self, secret):
        self.private = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self.private.public_key().public_bytes_raw()
        self.id = sha256(self.public).hexdigest()[:32]

    def envelope(self, fields):
        packed = pack({**fields, "sender": self.id, "statement": dict(sorted(fields["statement"].items()))})
        return self.private.sign(b"crowdml/envelope/1" + packed) + packed

    def authorization(self, method, target, body, seconds):
        lines = f"crowdml/request/1\n{method}\n{target}\n{seconds}\n{sha256(body).hexdigest()}"
        return f"Crowdml {self.id} {seconds} {self.base64(lines.encode())}"

    def enrolment(self, code, tasks=()):
        body = pack({"code": code, "key": self.public, **({"tasks": sorted(tasks)} if tasks else {})})
        return body, self.base64(b"crowdml/enrol/1" + sha256(body).digest())

    def base64(self, data):
        return urlsafe_b64encode(self.private.sign(data)).rstrip(b"=").decode()


def open_receipt(data, server_key):
    receipt = msgpack.unpackb(data)
    signature, path = receipt.pop("signature"), receipt.pop("path")
    root = sha256(b"\0" + pack(receipt)).digest()
    for side, other in struct.iter_unpack("B32s", path):  # 0 or 1: where the other hash stands; and that hash. No more
        root = sha256(b"\1" + (other + root, root + other)[side]).digest()
    Ed25519PublicKey.from_public_bytes(server_key).verify(signature, b"crowdml/receipts/1" + root)
    return receipt


def bernoulli_exp(gamma):  # true with probability exp(-gamma), for a fraction gamma >= 0
    if gamma > 1:
        return all(bernoulli_exp(Fraction(1)) for _ in range(int(gamma))) and bernoulli_exp(gamma % 1)
    k = 1
    while secrets.randbelow(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1


def discrete_laplace(scale):  # P(z) ~ exp(-|z| / scale)
    while True:
        u, v = secrets.randbelow(scale.numerator), 0
        if bernoulli_exp(Fraction(u, scale.numerator)):
            while bernoulli_exp(Fraction(1)):
                v += 1
            z, negative = (u + scale.numerator * v) // scale.denominator, secrets.randbelow(2)
            if z or not negative:
                return -z if negative else z


def discrete_gaussian(sigma):  # P(z) ~ exp(-z^2 / (2 sigma^2))
    t, variance = math.floor(sigma) + 1, sigma * sigma
    while True:
        z = discrete_laplace(Fraction(t))
        if bernoulli_exp((abs(z) - variance / t) ** 2 / (2 * variance)):
            return z


class Plan:  # what a device computes from the task's own bytes: grid, clip, noise, price
    def __init__(self, text):
        task = json.loads(text, parse_float=Fraction)
        privacy, protocol, norm = task["privacy"], task["protocol"], task["features"]["norm"]
        self.gaussian = norm["kind"] == "l2"
        wanted = ("sgd", "softmax", "discrete-gaussian" if self.gaussian else "discrete-laplace", False)
        if (protocol["kind"], task["model"]["kind"], privacy["mechanism"], task["as_published"]) != wanted:
            raise SystemExit(f"This device can join a task with {wanted[:3]} and sound accounting, and no other.")
        epsilon = {row: Fraction(value) for row, value in privacy["epsilon"].items()}
        self.batch, self.held_out = protocol["batch"], protocol.get("held_out", 0)
        self.shape, used = (task["features"]["dimension"], len(task["labels"]["classes"])), self.batch - self.held_out
        bound = min((math.sqrt(2) if self.gaussian else 2) * float(norm["bound"]), float(protocol.get("clip") or "inf"))
        loss, power = epsilon["gradient"], 1 + self.gaussian
        if self.gaussian:  # just below the largest rho for which rho-zCDP is (epsilon, delta)-DP
            order = 1 + np.exp(np.linspace(-9, 30, 400_000))
            cost = -np.log(order * float(privacy["delta"])) / (order - 1) + np.log1p(-1 / order)
            loss = Fraction(math.floor(np.max((float(loss) - cost) / order) * (1 - 1e-6) * 2**40), 2**40)
        most, step = int(2**15 / (2 / loss) ** Fraction(1, power)), Fraction(1)
        while bound / step < min(2**13, most) / 2:
            step /= 2
        while bound / step > 2**13 or math.ceil(bound / float(step) * (1 + 1e-6)) > most:
            step *= 2
        self.step = step if privacy["grid"] is None else Fraction(privacy["grid"])
        self.clip = math.ceil(bound / float(self.step) * (1 + 1e-6))
        scale = Fraction(math.sqrt(2 * self.clip**2 / loss) * (1 + 1e-12)) if self.gaussian else 2 * self.clip / loss
        kind, law = ("zcdp", discrete_gaussian) if self.gaussian else ("pure", discrete_laplace)
        self.rows = {"gradient": (law, scale, (kind, loss), (kind, used**power * loss))}  # a sample's and the device's
        for row, moves, covers in (("errors", 1, self.held_out or self.batch), ("labels", 2, self.batch)):
            if e := epsilon.get(row):
                self.rows[row] = (discrete_laplace, moves / e, ("pure", e), ("pure", covers * e))
        spared = min("gradient", "errors", key=lambda row: epsilon.get(row, 0)) if self.held_out else None
        self.dearest = [row for row in self.rows if row != spared]  # a sample pays for one of the two, held out or not
        self.epsilon = sum(epsilon[row] for row in self.dearest)
        self.budget = privacy["budget"] or {"epsilon": self.epsilon, "samples": 2**63}

    def statement(self, check_ins):
        device = [(kind, check_ins * loss) for _, _, _, (kind, loss) in self.rows.values()]
        found = {"dearest": [self.rows[row][2] for row in self.dearest], "device": device}
        for name, losses in found.items():
            kinds = sorted({kind for kind, _ in losses})
            found[name] = [f"{kind} {sum(loss for of, loss in losses if of == kind)}" for kind in kinds]
        return {**found, "samples": check_ins * self.batch}

    def sums(self, weights, x, y):
        hot, scores = y[:, None] == np.arange(self.shape[1]), x @ weights
        odds = np.exp(scores - scores.max(1, keepdims=True))
        rows = (x[:, :, None] * (odds / odds.sum(1, keepdims=True) - hot)[:, None, :])[self.held_out :]
        rows = np.nan_to_num(rows / float(self.step), nan=0.0, posinf=0.0, neginf=0.0)
        size = (lambda a: np.sqrt((a * a).sum((1, 2)))) if self.gaussian else (lambda a: np.abs(a).sum((1, 2)))
        steps = np.trunc(rows * np.minimum(1, self.clip / np.maximum(size(rows), 1e-30))[:, None, None])
        steps[size(steps) > self.clip] = 0
        wrong = (scores.argmax(1) != y)[: self.held_out or None]
        found = {"gradient": steps.sum(0), "errors": wrong.sum(keepdims=True), "labels": hot.sum(0)}
        return {row: found[row].astype("<i4") for row in self.rows}

    def body(self, sums, version, silent=False):
        fields = {"errors": None, "labels": None, "version": version}
        for row, (draw, scale, _, _) in self.rows.items():
            noise = np.array([0 if silent else draw(scale) for _ in range(sums[row].size)]).reshape(sums[row].shape)
            fields[row] = ["<i4", list(noise.shape), (sums[row] + noise).astype("<i4").tobytes()]
        return pack(fields)


def ask(url, body=None, wait=1.0, **headers):  # (headers, body); repeats where the server says so or cannot be reached
    while True:
        try:
            with urlopen(Request(url, body, headers), timeout=30) as answer:
                return answer.headers, answer.read()
        except HTTPError as error:
            if error.code not in (429, 503, 507):
                raise SystemExit(f"{url} answered {error.code}: {error.read(65536).decode()}") from error
            wait = float(error.headers.get("Retry-After", 5))
        except OSError:
            wait = min(60, 2 * wait)
        time.sleep(wait * (1 + secrets.randbelow(1000) / 1000))


def save(path, state):  # all or nothing, and on the disk before anything is sent: charge, then send
    with os.fdopen(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def take_part(url, code, table, path, check_ins):
    state = (
        json.loads(path.read_text()) if path.exists() else {"secret": secrets.token_hex(32), "done": 0, "outbox": ""}
    )
    key, kind = Key(bytes.fromhex(state["secret"])), {"Content-Type": "application/msgpack"}
    if "task" not in state:
        save(path, state)
        body, signature = key.enrolment(code)
        answer = msgpack.unpackb(ask(f"{url}/v1/devices", body, **kind, **{"Crowdml-Signature": signature})[1])
        state |= {"server_key": answer["server_key"].hex(), "task": answer["tasks"][0]}
        save(path, state)
    base, task = f"{url}/v1/tasks/{state['task']}", bytes.fromhex(state["task"])
    text = ask(base)[1]
    plan = Plan(text)
    if sha256(text).digest() != task or plan.epsilon > plan.budget["epsilon"]:
        raise SystemExit("The task is not the one that this device joined, or one check-in overspends its budget.")
    most = min(check_ins, plan.budget["samples"] // plan.batch, len(table) // plan.batch)
    while state["outbox"] or state["done"] < most:
        if not state["outbox"]:
            params = msgpack.unpackb(ask(f"{base}/publication")[1])
            weights = np.frombuffer(params["weights"][2], "<f4").reshape(plan.shape).astype(float)
            samples = table[state["done"] * plan.batch :][: plan.batch]
            body = plan.body(plan.sums(weights, samples[:, 1:], samples[:, 0].astype(int)), params["version"])
            state["done"] += 1
            fields = {"kind": "sgd/gradient/1", "body": body, "task": task, "to": ["server"], "seq": state["done"]}
            state["outbox"] = key.envelope({**fields, "statement": plan.statement(state["done"])}).hex()
            save(path, state)
        data = bytes.fromhex(state["outbox"])
        headers, body = ask(f"{base}/check-in", data, **kind)
        receipt = open_receipt(body, bytes.fromhex(state["server_key"]))
        if (receipt["task"], receipt["device"], receipt["hash"]) != (task, key.id, sha256(data).digest()):
            raise SystemExit("The receipt is for another check-in.")
        save(path, state := {**state, "outbox": ""})
        print(f"check-in {receipt['seq']} is number {receipt['index']} of the journal", flush=True)
        time.sleep(float(headers.get("Crowdml-Next", 0)) if state["done"] < most else 0)
    print(json.dumps({"check_ins": state["done"], **plan.statement(state["done"])}))


def check_vectors(folder):
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("vectors/*.json")}
    hexed, receipts, bodies = bytes.fromhex, read["receipts"], {row["body"] for row in read["messages"]}
    key, chain = Key(hexed(read["keys"][0]["secret"])), hexed(receipts["chain_0"])
    passed = [Key(hexed(row["secret"])).id == row["id"] for row in read["keys"]]
    for row in read["envelopes"]["valid"]:
        fields = {**row["envelope"], "body": hexed(row["envelope"]["body"]), "task": hexed(row["envelope"]["task"])}
        passed.append(key.envelope(fields).hex() == row["signed"])
    for row in read["envelopes"]["forged"]:
        with contextlib.suppress(InvalidSignature):
            key.private.public_key().verify((data := hexed(row["signed"]))[:64], b"crowdml/envelope/1" + data[64:])
            passed.append(False)
    for row in receipts["receipts"]:
        receipt = open_receipt(hexed(row["encoded"]), hexed(receipts["server_key"]))
        chain += receipt["task"] + receipt["device"].encode() + receipt["seq"].to_bytes(8, "big") + receipt["hash"]
        passed.append((chain := sha256(chain).digest()) == receipt["chain"])
    for row in read["requests"]["authorization"]:
        found = key.authorization(row["method"], row["target"], hexed(row["body"]), row["seconds"])
        passed.append(found == row["header"])
    passed += [key.enrolment(row["code"], row["tasks"])[1] == row["signature"] for row in read["requests"]["enrolment"]]
    for case in read["sgd"]:
        plan, x = Plan(case["task"]), np.reshape(case["x"]["values"], case["x"]["shape"])
        passed.append((str(plan.step), plan.clip) == (case["grid"], case["clip"]))
        for run in case["runs"]:
            sums = plan.sums(np.reshape(run["weights"]["values"], plan.shape), x, np.array(case["y"]))
            passed += [value.ravel().tolist() == run["without_noise"][row]["values"] for row, value in sums.items()]
        passed.append(plan.body(sums, 7, silent=True).hex() in bodies)
    raise SystemExit(print(f"{sum(passed)} of {len(passed)} vectors hold") or not all(passed))


if sys.argv[1:2] == ["--check-vectors"]:
    check_vectors(Path(sys.argv[2]))
url, code, samples, state, check_ins = sys.argv[1:]
take_part(url, code, np.loadtxt(samples, delimiter=",", ndmin=2), Path(state), int(check_ins))
