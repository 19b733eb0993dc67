"""spec/ is what the code makes, and a device that shares no code with it passes its vectors."""

import ast
import json
import math
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from make_vectors import SPEC, TASKS, build

from crowdml.messages import encode
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace
from crowdml.protocols import sgd
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key
from crowdml.wire.problems import PROBLEMS, Problem
from crowdml.wire.receipts import open_receipt
from crowdml.wire.requests import parse_authorization
from crowdml.wire.validate import decode_message

ROOT = SPEC.parent
CLIENT = ROOT / "examples" / "independent_client.py"
PROTOCOL = ROOT / "docs" / "protocol.md"
FILES = build()


def vectors(name: str):
    return json.loads((SPEC / "vectors" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_specification_is_what_the_code_makes(name):
    written = (SPEC / name).read_text(encoding="utf-8")
    assert written == FILES[name], f"Run `python tests/wire/make_vectors.py`, and look at what changed in spec/{name}."


def test_the_specification_has_no_file_that_the_code_does_not_make():
    found = {path.relative_to(SPEC).as_posix() for path in SPEC.rglob("*") if path.is_file()}
    assert found == set(FILES)


def test_envelopes_of_the_vectors_are_opened_verified_or_refused():
    found = vectors("envelopes")
    for row in found["valid"]:
        opened = open_signed(bytes.fromhex(row["signed"]))
        assert opened.verify(Key.from_secret(bytes.fromhex(row["secret"])).public)
        assert opened.hash.hex() == row["hash"]
        assert opened.statement.plain() == row["envelope"]["statement"]
    for row in found["malformed"]:
        with pytest.raises(Problem) as caught:
            open_signed(bytes.fromhex(row["signed"]))
        assert caught.value.slug == row["problem"]
    for row in found["forged"]:
        assert not open_signed(bytes.fromhex(row["signed"])).verify(bytes.fromhex(row["public"]))


def test_receipts_and_headers_of_the_vectors_verify():
    found = vectors("receipts")
    for row in found["receipts"]:
        assert open_receipt(bytes.fromhex(row["encoded"])).verify(bytes.fromhex(found["server_key"]))
    asked = vectors("requests")
    public = Key.from_secret(bytes.fromhex(asked["secret"])).public
    for row in asked["authorization"]:
        body = bytes.fromhex(row["body"])
        parse_authorization(row["header"]).check(public, row["method"], row["target"], body, now=row["seconds"])


def test_messages_of_the_vectors_are_decoded_as_their_task_expects():
    for row in vectors("messages"):
        if row["kind"] == "sgd/gradient/1":
            body = bytes.fromhex(row["body"])
            got = decode_message(row["kind"], body, sgd.protocol.expected(TASKS[row["task"]]))
            assert encode(got) == body
            assert got.gradient.value.ravel().tolist() == row["fields"]["gradient"]["values"]


# --- the independent device ---


def client_names() -> dict[str, object]:
    """The functions of the example, without its last lines, which run it."""
    tree = ast.parse(CLIENT.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
    ]
    names: dict[str, object] = {}
    exec(compile(tree, str(CLIENT), "exec"), names)
    return names


def test_the_independent_device_passes_the_vectors():
    done = subprocess.run(
        [sys.executable, str(CLIENT), "--check-vectors", str(SPEC)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed, of = re.findall(r"\d+", done.stdout)
    assert passed == of
    assert int(of) > 25


def test_the_independent_device_notices_a_wrong_vector(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    changed = json.loads(FILES["vectors/sgd.json"])
    changed[0]["runs"][1]["without_noise"]["gradient"]["values"][0] += 1
    (tmp_path / "vectors" / "sgd.json").write_text(json.dumps(changed), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(CLIENT), "--check-vectors", str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 1


def test_the_independent_device_is_short_and_shares_no_code_with_the_library():
    text = CLIENT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert imported - set(sys.stdlib_module_names) == {"msgpack", "numpy", "cryptography"}


def test_the_independent_device_prices_a_task_as_we_do_or_a_hair_lower():
    """Its own search for rho stops a millionth below ours: a little more noise, and never less."""
    plan_of = client_names()["Plan"]
    for case in vectors("sgd"):
        plan = plan_of(case["task"])  # pyright: ignore[reportCallIssue]
        for name, row in case["rows"].items():
            _, scale, (kind, loss), (_, device_loss) = plan.rows[name]
            ours_kind, ours_loss = row["loss"].split()
            assert kind == ours_kind
            for mine, theirs in ((ours_loss, loss), (row["device_loss"].split()[1], device_loss)):
                assert Fraction(mine) * (1 - Fraction(3, 10**6)) <= theirs <= Fraction(mine)
            noise = Fraction(row["noise"].get("sigma") or row["noise"]["scale"])
            assert noise * (1 - Fraction(1, 10**8)) <= scale <= noise * (1 + Fraction(3, 10**6))
        if not plan.gaussian:
            assert plan.statement(3) == case["statement"]["after_3"]


@pytest.mark.parametrize(
    ("sampler", "law"),
    [("discrete_laplace", DiscreteLaplace(Fraction(7, 3))), ("discrete_gaussian", DiscreteGaussian(Fraction(7, 2)))],
)
def test_the_independent_device_draws_the_law_that_it_says(sampler, law):
    """A chi-square statistic over 20,000 draws; beyond its bound with a chance below 1e-9."""
    draw, count = client_names()[sampler], 20_000
    parameter = getattr(law, "scale", None) or law.sigma
    drawn = np.array([draw(parameter) for _ in range(count)])  # pyright: ignore[reportCallIssue]
    cells = np.arange(-6, 7)
    seen = np.array([*(np.sum(drawn == cell) for cell in cells), np.sum(np.abs(drawn) > 6)])
    chance = law.pmf(cells)
    expected = count * np.array([*chance, 1 - chance.sum()])
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(cells)
    assert statistic < freedom + 6.5 * math.sqrt(2 * freedom) + 30


# --- the page ---


def headings() -> set[str]:
    return set(re.findall(r"^#+ (.+)$", PROTOCOL.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_page_has_a_heading_for_every_message_kind_endpoint_and_header():
    kinds = {"sgd/params/1", "sgd/gradient/1"}
    endpoints = {
        "POST /v1/devices", "GET /v1/tasks", "GET /v1/tasks/{hash}", "GET /v1/tasks/{hash}/publication",
        "GET /v1/tasks/{hash}/publications/{version}", "POST /v1/tasks/{hash}/check-in",
        "GET /v1/devices/{id}/statement", "POST /v1/devices/{id}/withdraw", "GET /healthz", "GET /readyz",
        "GET /metrics", "GET /openapi.json",
    }  # fmt: skip
    headers = {"Authorization", "Crowdml-Signature", "Crowdml-Kind", "Crowdml-Version", "Crowdml-Next", "Crowdml-State"}
    named = {name for heading in headings() for name in re.findall(r"`([^`]+)`", heading)}
    assert kinds | endpoints | headers <= named


def test_the_page_has_a_row_for_every_problem_as_the_code_says_it():
    text = PROTOCOL.read_text(encoding="utf-8")
    for slug, row in PROBLEMS.items():
        assert f"| `{slug}` | {row.status} | {row.title} | {row.help} |" in text


def test_the_page_names_every_file_of_the_specification():
    text = PROTOCOL.read_text(encoding="utf-8")
    for name in FILES:
        file = name.split("/")[-1]
        assert f"`{file}`" in text or file.removesuffix(".json") in ("sgd-params-1", "sgd-gradient-1")


def laplace_reach(scale: Fraction) -> int:
    """The least t with P(|z| > t) = 2 q^(t+1) / (1 + q) below 2^-64, q = exp(-1/scale)."""
    q = math.exp(-1 / scale)
    return math.floor(float(scale) * (64 * math.log(2) + math.log(2 / (1 + q))))


@pytest.mark.parametrize("name", TASKS)
def test_the_range_of_an_entry_is_the_one_line_that_the_page_gives(name):
    """Review 2, network gap 6: the page gave the range in words, and its numbers stood in the vectors alone."""
    task = TASKS[name]
    fixed = sgd.plan(task)
    b, h = fixed.settings.batch, fixed.settings.held_out
    table, expected = sgd.mechanisms(task), sgd.protocol.expected(task)["sgd/gradient/1"]
    most = {"errors": h or b, "labels": b}
    for row, mechanism in table.items():
        if row == "gradient":
            bound = (b - h) * int(mechanism.clip)
            assert expected[row].high == -expected[row].low > bound
            if name != "laplace":
                continue
            reach = expected[row].high - bound
        else:
            reach, bound = -expected[row].low, most[row]
        assert (expected[row].high - bound, reach) == (laplace_reach(mechanism.scale),) * 2


def test_a_check_in_moves_the_weights_as_the_page_says():
    """Review 2, network gap 5: w - c s g / b stood nowhere."""
    from crowdml.messages import SERVER
    from crowdml.privacy.private import RECEIVED, Release
    from crowdml.protocol import Context

    task = TASKS["laplace"]
    fixed = sgd.plan(task)
    b, h = fixed.settings.batch, fixed.settings.held_out
    state = sgd.server.start(task, Context(me=SERVER)).state
    sums = np.arange(state.weights.size, dtype="<i4").reshape(state.weights.shape) * 1000
    empty = {
        row: None if row not in sgd.mechanisms(task) else Release(np.zeros(size, "<i4"), RECEIVED)
        for row, size in (("errors", 1), ("labels", task.classes or 0))
    }
    said = sgd.Gradient(gradient=Release(sums, RECEIVED), version=0, **empty)
    weights = state.weights
    for t in (1, 2):
        state = sgd.apply(task, state, said, Context(me=SERVER, sender="x")).state
        c, radius = float(fixed.settings.step.c), float(fixed.settings.radius)
        rate = {"1/sqrt(t)": c / math.sqrt(t), "1/t": c / t, "constant": c}[fixed.settings.step.schedule]
        weights = weights - rate * (float(fixed.grid.step) * sums / (b - h) + float(task.model.get("l2", 0)) * weights)
        size = math.sqrt(float((weights**2).sum()))
        weights = weights * min(1.0, radius / size) if size else weights
        np.testing.assert_allclose(state.weights, weights, rtol=1e-5)


def test_every_parameter_that_a_vector_signs_is_one_that_the_page_has():
    """Review 2, network gap 7: a vector signed `publication?full=1`, and no such parameter exists."""
    page = PROTOCOL.read_text(encoding="utf-8")
    signed = 0
    for row in vectors("requests")["authorization"]:
        path, _, query = row["target"].partition("?")
        for pair in filter(None, query.split("&")):
            signed += 1
            last = path.rsplit("/", 1)[-1]
            assert re.search(rf"^### `{row['method']} [^`]*/{last}\?[^`]*\b{pair.partition('=')[0]}=", page, re.M), pair
    assert signed


@pytest.mark.parametrize(
    "words",
    ["### `Crowdml-Index` and `Crowdml-Chain`", "## Transcripts", "crowdml/transcript/1", "`pure 0`", "`pure 2`"],
)
def test_the_page_tells_a_device_s_author_what_stood_elsewhere(words):
    """Review 2, network gaps 1, 4 and 10."""
    assert words in PROTOCOL.read_text(encoding="utf-8")


def test_the_columns_of_cards_are_named_where_cards_are_explained():
    """Review 2, network gap 9."""
    for page, words in (("server.md", "`label,code,url,command`"), ("commands.md", "`label`, `code`, `url`")):
        assert words in (ROOT / "docs" / page).read_text(encoding="utf-8")
