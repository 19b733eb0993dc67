/** The machine's conversations with a server that signs by hand: what is written, asked and told, in which order. */

import { concat, fromHex, sha256, toHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { decode, encode, packFloats } from "../../../src/crowdml/web/device/codec.js";
import { openEnvelope, signEnvelope } from "../../../src/crowdml/web/device/envelopes.js";
import { generateKey, sign } from "../../../src/crowdml/web/device/keys.js";
import {
  advance,
  hasNone,
  newMembership,
  newWhole,
  opened,
  recoveredFrom,
} from "../../../src/crowdml/web/device/machine.js";
import { check, equal, holds, refused } from "./expect.js";
import { silence } from "./silence.js";

/**
 * @typedef {import("../../../src/crowdml/web/device/machine.js").Effect} Effect
 * @typedef {import("../../../src/crowdml/web/device/machine.js").Event} Event
 * @typedef {import("../../../src/crowdml/web/device/machine.js").State} State
 * @typedef {import("../../../src/crowdml/web/device/machine.js").Write} Write
 * @typedef {import("../../../src/crowdml/web/device/machine.js").Ask} Ask
 * @typedef {import("../../../src/crowdml/web/device/keys.js").Key} Key
 */

const TASK =
  '{"as_published":false,"collects":"numbers","features":{"dimension":2,"kind":"vector","norm":{"bound":1.0,"kind":"l2"}},"labels":{"bound":1.0,"classes":["left","right","2"],"kind":"class"},"model":{"kind":"softmax"},"name":"rows","privacy":{"budget":{"epsilon":1.0,"samples":10},"delta":1e-06,"epsilon":{"gradient":1.0},"grid":null,"mechanism":"discrete-gaussian","unit":"sample"},"protocol":{"batch":2,"kind":"sgd","step":{"c":1.0}},"purpose":"","stop":{"error":null,"steps":null},"title":"Lines of a file"}';

/** A device, its server's key, and what it did. */
class Bench {
  /** @param {State} state @param {Key} key @param {Key} server */
  constructor(state, key, server) {
    this.state = state;
    this.key = key;
    this.server = server;
    this.now = 1_000_000;
    /** @type {Effect[]} the effects of the last event */
    this.effects = [];
    /** @type {Effect[]} */
    this.all = [];
  }

  /** @param {string} [text] of the task */
  static async of(text = TASK) {
    const key = await generateKey();
    const membership = newMembership(toHex(await sha256(toUtf8(text))), "code", 0);
    const found = { membership, whole: newWhole(), charges: [], messages: [], samples: [] };
    return new Bench(await opened(found), key, await generateKey());
  }

  /** A device that has joined and waits for samples. @param {string} [text] */
  static async joined(text = TASK) {
    const bench = await Bench.of(text);
    await bench.hears({ kind: "started" });
    await bench.enrolled();
    await bench.answers(200, toUtf8(text));
    equal(bench.asks, null, "what it asks while it has no samples");
    return bench;
  }

  /** @param {Event} event */
  async hears(event) {
    const context = { key: this.key, now: this.now, chance: () => 0.5, noise: silence };
    const step = await advance(this.state, event, context);
    this.state = step.state;
    this.effects = [...step.effects];
    this.all.push(...step.effects);
  }

  /** @param {number} status @param {Uint8Array} [body] @param {{ [name: string]: string }} [headers] */
  async answers(status, body = new Uint8Array(), headers = {}) {
    await this.hears({ kind: "answered", status, headers, body: new Uint8Array(body) });
  }

  /** @param {number} status @param {string} slug @param {object} [more] @param {{ [name: string]: string }} [headers] */
  async refuses(status, slug, more = {}, headers = {}) {
    const body = toUtf8(JSON.stringify({ type: `/problems/${slug}`, status, detail: `It is ${slug}.`, ...more }));
    await this.answers(status, body, headers);
  }

  async enrolled(status = 201) {
    const tasks = [this.state.membership.task];
    await this.answers(status, encode({ device: this.key.id, server_key: this.server.public, tasks }));
  }

  /** @param {number} [samples] @param {number} [y] */
  async senses(samples = 2, y = 1) {
    const sensed = Array.from({ length: samples }, () => ({ x: Float32Array.of(0.5, 0.25), y }));
    await this.hears({ kind: "sensed", samples: sensed, tap: 1 });
  }

  /** @param {{ [name: string]: string }} [headers] */
  async publishes(headers = {}) {
    const body = encode({ version: 0, weights: packFloats(new Float32Array(6), [2, 3]) });
    const said = { "crowdml-kind": "sgd/params/1", "crowdml-state": "running", "etag": '"0"', ...headers };
    await this.answers(200, body, said);
  }

  /** The server's receipt for what was asked last. @param {Key} [by] @param {number} [index]
   * @param {{ [name: string]: string }} [headers] */
  async receipts(by = this.server, index = 1, headers = {}) {
    const bytes = new Uint8Array(this.asked.body ?? []);
    const { task, seq } = openEnvelope(bytes);
    const said = { chain: new Uint8Array(32), device: this.key.id, hash: await sha256(bytes), index, seq, task };
    const root = await sha256(concat(Uint8Array.of(0), encode(said)));
    const signature = await sign(by, concat(toUtf8("crowdml/receipts/1"), root));
    await this.answers(202, encode({ ...said, path: new Uint8Array(0), signature }), headers);
  }

  /** The name of what it asks now. */
  get asks() {
    return this.state.asked;
  }

  /** The last request. @returns {Ask} */
  get asked() {
    const found = this.all.findLast((each) => each.do === "ask");
    if (found?.do !== "ask") throw new Error("nothing was asked");
    return found;
  }

  /** How many charges were written. */
  get charged() {
    return this.all.reduce((sum, each) => sum + (each.do === "write" ? (each.records.charges?.length ?? 0) : 0), 0);
  }

  /** Let the time pass that the machine waits for. */
  async rests() {
    const wait = this.all.findLast((each) => each.do === "wait");
    if (wait?.do === "wait") this.now += wait.milliseconds;
    await this.hears({ kind: "woken" });
  }

  /** A check-in up to its request. */
  async gives() {
    await this.senses();
    await this.publishes();
    equal(this.asks, "check-in", "what it asks");
  }
}

export function checks() {
  return [
    check("a device enrols, reads the task that was consented to, and asks nothing more", joins),
    check("charges and the signed message are one write, and the request with those bytes follows it", chargesFirst),
    check("what was cut off is sent again byte for byte, and charged once", resends),
    check("a receipt that another key signed is refused, and the message waits", forged),
    check("a receipt for other bytes is refused", receiptOfAnother),
    check("four refusals in a row stop the device", manyRefusals),
    check("another task than was consented to is refused", otherTask),
    check("another server's key than the pinned one is refused", otherServer),
    check("a 409 without a proof ends the run, and the message waits", unproven),
    check("a message of its own that the ledger does not know ends the device for good", copied),
    check("a server that was restored gets the same release under the number it expects", restored),
    check("totals that fell, without a proof, end the run", fell),
    check("a message that the server will never take stops the device", wrong),
    check("a stale message is dropped, stays charged, and the next is drawn anew", stale),
    check("a paused task is waited for, and nothing is charged", paused),
    check("a stopped task, a revoked device and a withdrawn one end with their sentence", endings),
    check("nothing is drawn once the budget is spent", spent),
    check("a batch serves as often as the task says, on the same serials", uses),
    check("every sample takes its place, whatever its label", labels),
    check("at a full buffer nothing is collected", full),
    check("a server that is away is asked later and later", later),
    check("a device comes back when the server says, spread by half of that", window),
    check("a pause of the owner sends nothing", ownersPause),
    check("a pause during a check-out charges nothing", pauseInFlight),
    check("a device withdraws, and forgets what waits", withdraws),
    check("a withdrawal is on disk before it is asked, and a device that is opened again goes on with it", leaves),
    check("a withdrawal during a check-out charges nothing", leavesInFlight),
    check("a withdrawal is asked whatever the server answered before it", leavesRefused),
    check("a withdrawal is asked where nobody knows whether the device enrolled", leavesUnknown),
    check("an answer that nobody waits for is not heard", notAsked),
    check("a sample of another study is refused", otherStudy),
    check("samples on both sides of another study's are not one batch", gap),
    check("a batch under way ends where another study took serials", gapWhileServing),
    check("only the server's own word says that it has no message of a device", none),
    check("a device that is started again goes on where its writes ended", reopened),
    check("a new ledger begins with the statement's totals", recovered),
  ];
}

async function joins() {
  const bench = await Bench.of();
  await bench.hears({ kind: "started" });
  equal(bench.asks, "enrol", "the first question");
  await bench.enrolled();
  equal(bench.effects.map((each) => each.do), ["write", "ask"], "effects");
  equal(bench.asks, "task", "the second question");
  await bench.answers(200, toUtf8(TASK));
  equal(bench.asks, null, "what it asks then");
  const known = await Bench.of();
  await known.hears({ kind: "started" });
  await known.enrolled(200);
  await known.answers(200, toUtf8(TASK));
  equal(known.asks, "statement", "what a device asks that the server knew");
}

async function chargesFirst() {
  const bench = await Bench.joined();
  await bench.senses();
  equal(bench.asks, "publication", "what it asks with a batch");
  equal(bench.charged, 0, "charges before it has checked out");
  await bench.publishes();
  const [write, ask] = bench.effects;
  equal(bench.effects.map((each) => each.do), ["write", "ask"], "effects");
  if (write.do !== "write" || ask.do !== "ask") throw new Error("not a write and a request");
  const [message] = write.records.messages ?? [];
  equal(ask.body, message.bytes, "the bytes that are sent");
  equal(write.records.forget, [0, 1], "the samples that have served");
  const { statement, seq } = openEnvelope(new Uint8Array(ask.body ?? []));
  equal([statement.samples, seq], [2, 1], "what the envelope says");
  await bench.receipts();
  equal(bench.asks, null, "what it asks then");
  holds(bench.state.messages[0].receipt, "the receipt is kept");
}

async function resends() {
  const bench = await Bench.joined();
  await bench.gives();
  const first = bench.asked.body;
  for (let time = 0; time < 3; time++) {
    await bench.hears({ kind: "unreachable" });
    equal(bench.asks, null, "what it asks before the pause is over");
    await bench.rests();
    equal([bench.asks, bench.asked.body], ["check-in", first], "what is sent again");
  }
  equal(bench.charged, 1, "charges");
  await bench.receipts();
  equal(bench.state.ending, null, "the end");
}

async function forged() {
  const bench = await Bench.joined();
  await bench.gives();
  await bench.receipts(await generateKey());
  equal(bench.state.ending?.why, "receipt-forged", "the end");
  equal(bench.state.messages[0].receipt, null, "the receipt");
  await bench.hears({ kind: "retried" });
  equal(bench.asks, "check-in", "what is asked when its owner tries again");
}

async function receiptOfAnother() {
  const bench = await Bench.joined();
  await bench.gives();
  const { body } = bench.asked;
  const other = new Uint8Array(body ?? []);
  other[0] ^= 1; // of the signature: another message to the journal
  bench.all.push({ ...bench.asked, body: other });
  await bench.receipts();
  equal(bench.state.ending?.why, "receipt-of-another", "the end");
}

async function manyRefusals() {
  const bench = await Bench.joined();
  for (let time = 0; time < 4; time++) {
    await bench.gives();
    await bench.refuses(422, "stale");
  }
  equal([bench.state.ending?.why, bench.charged], ["many-refusals", 4], "the end");
}

async function otherTask() {
  const bench = await Bench.of();
  await bench.hears({ kind: "started" });
  await bench.enrolled();
  await bench.answers(200, toUtf8(TASK.replace("rows", "cows")));
  equal([bench.state.ending?.kind, bench.state.ending?.why], ["refused", "bad-task"], "the end");
}

async function otherServer() {
  const bench = await Bench.of();
  const pinned = await generateKey();
  bench.state = { ...bench.state, whole: { ...newWhole(), serverKey: pinned.public } };
  await bench.hears({ kind: "started" });
  await bench.enrolled(200);
  equal(bench.state.ending?.why, "other-server", "the end");
}

async function unproven() {
  const bench = await Bench.joined();
  await bench.gives();
  await bench.refuses(409, "seq-conflict", { expected: 7 });
  equal(bench.asks, "statement", "what it asks in doubt");
  await bench.refuses(404, "not-found");
  equal([bench.state.ending?.kind, bench.state.ending?.why], ["refused", "seq-conflict"], "the end");
  equal([bench.charged, bench.state.messages[0].dropped], [1, false], "charges, and what became of the message");
}

async function copied() {
  const bench = await Bench.joined();
  await bench.gives();
  await bench.refuses(409, "seq-conflict", { expected: 2 });
  const { data: _, ...mine } = openEnvelope(new Uint8Array(bench.state.messages[0].bytes ?? []));
  const other = await signEnvelope({ ...mine, body: encode({ other: 1 }) }, bench.key);
  await bench.answers(200, other);
  equal([bench.state.ending?.kind, bench.state.whole.exhausted], ["exhausted", true], "the end");
  equal(bench.effects.map((each) => each.do), ["write"], "it is on disk");
  await bench.hears({ kind: "retried" });
  equal(bench.asks, null, "what it asks when its owner tries again");
}

async function restored() {
  const bench = await Bench.joined();
  for (const index of [1, 2]) {
    await bench.gives();
    await bench.receipts(bench.server, index);
  }
  await bench.gives();
  const before = openEnvelope(new Uint8Array(bench.asked.body ?? []));
  await bench.refuses(409, "seq-gap", { expected: 2 });
  equal(bench.asks, "statement", "what it asks in doubt");
  await bench.answers(200, new Uint8Array(bench.state.messages[0].bytes ?? []));
  equal(bench.asks, "check-in", "what it asks then");
  const after = openEnvelope(new Uint8Array(bench.asked.body ?? []));
  equal([after.seq, after.body, after.statement], [2, before.body, before.statement], "the message");
  equal(bench.charged, 3, "charges");
  await bench.receipts();
  await bench.gives();
  equal(openEnvelope(new Uint8Array(bench.asked.body ?? [])).seq, 3, "the next number");
}

async function fell() {
  const bench = await Bench.joined();
  await bench.gives();
  await bench.refuses(409, "totals-fell");
  equal(bench.asks, "statement", "what it asks in doubt");
  await bench.refuses(404, "not-found");
  equal([bench.state.ending?.kind, bench.state.ending?.why], ["refused", "totals-fell"], "the end");
}

async function wrong() {
  const bench = await Bench.joined();
  await bench.gives();
  await bench.refuses(422, "wrong-message");
  equal(bench.state.ending?.kind, "refused", "the end");
  await bench.senses();
  equal(bench.charged, 1, "charges");
}

async function stale() {
  const bench = await Bench.joined();
  await bench.gives();
  await bench.refuses(422, "stale");
  holds(bench.state.messages[0].dropped, "the message is dropped");
  equal(bench.charged, 1, "charges");
  await bench.gives();
  equal(openEnvelope(new Uint8Array(bench.asked.body ?? [])).seq, 1, "its number was not used up");
  equal(bench.charged, 2, "charges");
}

async function paused() {
  const bench = await Bench.joined();
  await bench.senses();
  await bench.publishes({ "crowdml-state": "paused", "crowdml-next": "4" });
  equal([bench.asks, bench.charged, bench.state.taskPaused], [null, 0, true], "while it is paused");
  await bench.rests();
  await bench.publishes();
  await bench.refuses(503, "task-paused", {}, { "retry-after": "7" });
  equal([bench.asks, bench.state.taskPaused], [null, true], "while its check-in waits");
  await bench.rests();
  equal([bench.asks, bench.charged], ["check-in", 1], "then");
}

async function endings() {
  for (
    const [status, slug, kind] of /** @type {const} */ ([
      [410, "task-stopped", "stopped"],
      [403, "revoked", "revoked"],
      [410, "withdrawn", "withdrawn"],
      [401, "clock", "refused"],
    ])
  ) {
    const bench = await Bench.joined();
    await bench.gives();
    await bench.refuses(status, slug);
    equal([bench.state.ending?.kind, bench.state.ending?.why], [kind, slug], `the end after ${slug}`);
  }
  const bench = await Bench.joined();
  await bench.senses();
  await bench.publishes({ "crowdml-state": "stopped" });
  equal([bench.state.ending?.kind, bench.charged], ["stopped", 0], "the end of a task that was stopped");
}

async function spent() {
  const bench = await Bench.joined();
  for (let index = 1; index <= 5; index++) {
    await bench.gives();
    await bench.receipts(bench.server, index);
  }
  await bench.senses();
  equal([bench.asks, bench.state.ending?.kind, bench.charged], [null, "budget", 5], "after ten samples of ten");
}

async function uses() {
  const bench = await Bench.joined(
    TASK.replace('"epsilon":1.0,"samples"', '"epsilon":1.0,"samples"').replace(
      '"unit":"sample"',
      '"unit":"sample","uses":2',
    ),
  );
  await bench.gives();
  await bench.receipts();
  equal([bench.asks, bench.state.waiting.length], ["publication", 2], "after the first use");
  await bench.publishes();
  await bench.receipts(bench.server, 2);
  equal([bench.asks, bench.state.waiting.length], [null, 0], "after the second");
  const spans = bench.state.history.charges.map(({ first, last }) => [first, last]);
  equal(spans, [[0, 1], [0, 1]], "the spans that were charged");
}

async function labels() {
  const bench = await Bench.joined();
  await bench.senses(1, -1);
  await bench.senses(1, 2);
  equal(bench.asks, "publication", "a sample without a label counts like any other");
  await bench.hears({ kind: "relabelled", tap: 1, y: 0, before: 0 });
  equal(bench.state.waiting.map(({ y, tap }) => [y, tap]), [[0, 0], [0, 0]], "labels that were taken back");
  await bench.publishes();
  equal(bench.charged, 1, "charges");
}

async function full() {
  const bench = await Bench.joined();
  await bench.senses(50);
  equal(bench.state.waiting.length, 20, "samples that wait");
}

async function later() {
  const bench = await Bench.joined();
  await bench.senses();
  /** @type {number[]} */
  const pauses = [];
  for (let time = 0; time < 12; time++) {
    await bench.hears({ kind: "unreachable" });
    const wait = bench.effects.find((each) => each.do === "wait");
    pauses.push(wait?.do === "wait" ? wait.milliseconds : 0);
    await bench.rests();
  }
  equal(pauses.slice(0, 4), [750, 1500, 3000, 6000], "the first pauses");
  equal(pauses.at(-1), 225_000, "the longest");
  await bench.refuses(503, "busy", {}, { "retry-after": "999999999" });
  const wait = bench.effects.find((each) => each.do === "wait");
  equal(wait?.do === "wait" ? wait.milliseconds : 0, 7 * 86_400_000 + 150_000, "the longest that a server asks for");
}

async function window() {
  const bench = await Bench.joined();
  await bench.senses(4);
  await bench.publishes();
  await bench.receipts(bench.server, 1, { "crowdml-next": "10" });
  equal(bench.asks, null, "what it asks before the window");
  const wait = bench.effects.find((each) => each.do === "wait");
  equal(wait?.do === "wait" ? wait.milliseconds : 0, 10_000, "the pause");
  await bench.rests();
  equal(bench.asks, "publication", "what it asks then");
  await bench.publishes();
  await bench.receipts(bench.server, 2, { "crowdml-next": "999999999" });
  await bench.senses();
  const longest = bench.effects.find((each) => each.do === "wait");
  equal(longest?.do === "wait" ? longest.milliseconds : bench.state.notBefore - bench.now, 86_400_000, "the longest");
}

async function ownersPause() {
  const bench = await Bench.joined();
  await bench.hears({ kind: "paused" });
  await bench.senses();
  equal(bench.asks, null, "what it asks while it is paused");
  await bench.hears({ kind: "resumed" });
  equal(bench.asks, "publication", "what it asks then");
}

async function withdraws() {
  const bench = await Bench.joined();
  await bench.senses(3);
  await bench.publishes();
  await bench.receipts();
  await bench.hears({ kind: "withdrew" });
  equal([bench.asks, bench.asked.signed], ["withdraw", true], "what it asks");
  await bench.answers(200, toUtf8("{}"));
  equal([bench.state.ending?.kind, bench.state.waiting.length], ["withdrawn", 0], "the end");
  const [write] = bench.effects;
  equal(write.do === "write" && write.records.forget, [2], "samples that are forgotten");
}

async function pauseInFlight() {
  const bench = await Bench.joined();
  await bench.senses();
  equal(bench.asks, "publication", "what it asks");
  await bench.hears({ kind: "paused" });
  await bench.publishes();
  equal([bench.asks, bench.charged], [null, 0], "what it asks, and what was charged");
  await bench.hears({ kind: "resumed" });
  await bench.answers(304, new Uint8Array(), { "crowdml-state": "running" });
  equal([bench.asks, bench.charged], ["check-in", 1], "then");
}

/** The same device in a new process, with what was written. @param {Bench} bench */
async function openedAgain(bench) {
  const { membership, whole, history, messages, waiting } = bench.state;
  const found = { membership, whole, charges: history.charges, messages, samples: waiting };
  const next = new Bench(await opened(found), bench.key, bench.server);
  await next.hears({ kind: "started" });
  return next;
}

async function leaves() {
  const bench = await Bench.joined();
  await bench.senses(3);
  await bench.publishes();
  await bench.receipts();
  await bench.hears({ kind: "withdrew" });
  const [write, ask] = bench.effects;
  equal([write.do === "write" && write.records.whole?.leaving, ask.do], [true, "ask"], "effects");
  await bench.hears({ kind: "unreachable" });
  const next = await openedAgain(bench);
  equal(next.asks, "withdraw", "the first question of a new process");
  await next.senses();
  equal(next.state.waiting.length, 1, "samples that wait");
  await next.refuses(401, "clock");
  equal([next.asks, next.state.ending?.why], [null, "clock"], "the end");
  await next.hears({ kind: "retried" });
  equal(next.asks, "withdraw", "what it asks when its owner tries again");
  await next.answers(200, toUtf8("{}"));
  equal([next.state.ending?.kind, next.state.whole.leaving, next.charged], ["withdrawn", false, 0], "the end");
}

async function leavesInFlight() {
  const bench = await Bench.joined();
  await bench.senses();
  await bench.hears({ kind: "withdrew" });
  await bench.publishes();
  equal([bench.asks, bench.charged], ["withdraw", 0], "what it asks, and what was charged");
}

async function leavesRefused() {
  const bench = await Bench.joined();
  await bench.gives();
  await bench.hears({ kind: "withdrew" });
  await bench.refuses(410, "task-stopped");
  equal(bench.asks, "withdraw", "what it asks");
  await bench.refuses(404, "unknown-device");
  equal(bench.state.ending?.kind, "withdrawn", "the end");
}

async function leavesUnknown() {
  const bench = await Bench.of();
  await bench.hears({ kind: "started" });
  await bench.hears({ kind: "unreachable" });
  await bench.hears({ kind: "withdrew" });
  equal(bench.asks, "withdraw", "what it asks");
  await bench.refuses(404, "unknown-device");
  equal([bench.asks, bench.state.ending?.kind], [null, "withdrawn"], "the end");
}

async function notAsked() {
  const bench = await Bench.joined();
  const before = bench.state;
  await bench.answers(200, toUtf8(TASK));
  equal([bench.effects, bench.state.ending], [[], null], "after an answer");
  await bench.hears({ kind: "unreachable" });
  equal([bench.effects, bench.state.failures, bench.state.notBefore], [[], 0, before.notBefore], "after a failure");
}

async function otherStudy() {
  const bench = await Bench.joined();
  const sensed = [{ x: new Float32Array(3), y: 0 }];
  const error = await refused(() => bench.hears({ kind: "sensed", samples: sensed, tap: 0 }));
  equal([error.message, bench.state.waiting], ["This sample is of another study.", []], "what is refused");
}

async function gap() {
  const bench = await Bench.joined();
  await bench.senses(1);
  bench.state = { ...bench.state, whole: { ...bench.state.whole, nextSerial: 5 } }; // another study took four
  await bench.senses(1);
  equal([bench.asks, bench.state.waiting.map(({ serial }) => serial)], [null, [5]], "what waits");
  const [write] = bench.effects;
  equal(write.do === "write" && write.records.forget, [0], "samples that are forgotten");
  await bench.senses(1);
  await bench.publishes();
  const spans = bench.state.history.charges.map(({ first, last }) => [first, last]);
  equal(spans, [[5, 6]], "the spans that were charged");
  const torn = await Bench.joined();
  await torn.senses();
  const waiting = torn.state.waiting.map((each, at) => ({ ...each, serial: 4 * at }));
  torn.state = { ...torn.state, waiting };
  const error = await refused(() => torn.publishes());
  equal([error.message, torn.charged], ["A batch is one span of serials.", 0], "what is refused");
}

async function gapWhileServing() {
  const bench = await Bench.joined(TASK.replace('"unit":"sample"', '"unit":"sample","uses":2'));
  await bench.gives();
  holds(bench.state.membership.serving, "a batch is under way");
  await bench.hears({ kind: "paused" });
  await bench.receipts();
  const { whole, membership, waiting } = bench.state;
  bench.state = { ...bench.state, whole: { ...whole, nextSerial: 5 } };
  await bench.senses();
  const [write] = bench.effects;
  if (write.do !== "write") throw new Error("not a write");
  equal([write.records.membership?.serving, write.records.forget], [null, [0, 1]], "what is written");
  const found = { membership, whole, charges: [], messages: [], samples: waiting.slice(1) };
  equal((await opened(found)).membership.serving, null, "where the batch's first sample is gone");
  await bench.hears({ kind: "resumed" });
  await bench.answers(304, new Uint8Array(), { "crowdml-state": "running" });
  await bench.receipts(bench.server, 2);
  equal(bench.state.membership.serving, { first: 5, served: 1 }, "the next batch");
}

/** @param {number} status @param {string} slug */
function saysNone(status, slug) {
  return hasNone({ status, headers: {}, body: toUtf8(JSON.stringify({ type: `/problems/${slug}` })) });
}

function none() {
  const [gone, unknown, revoked] = [
    saysNone(404, "not-found"),
    saysNone(404, "unknown-device"),
    saysNone(403, "revoked"),
  ];
  equal([gone, unknown, revoked], [true, true, true], "that it has none");
  const others = [saysNone(401, "clock"), saysNone(403, "forbidden"), saysNone(408, ""), saysNone(404, "")];
  equal(others, Array(4).fill(false), "anything else");
}

async function reopened() {
  const bench = await Bench.joined();
  await bench.gives();
  const sent = bench.asked.body;
  const { membership, whole, history, messages } = bench.state;
  const again = await opened({ membership, whole, charges: history.charges, messages, samples: [] });
  const next = new Bench(again, bench.key, bench.server);
  await next.hears({ kind: "started" });
  equal(next.asks, "statement", "the first question of a new process");
  await next.refuses(404, "not-found");
  equal([next.asks, next.asked.body], ["check-in", sent], "what is sent");
  await next.receipts();
  await next.gives();
  equal(openEnvelope(new Uint8Array(next.asked.body ?? [])).statement.samples, 4, "samples of the next statement");
}

async function recovered() {
  const bench = await Bench.joined();
  await bench.gives();
  const bytes = new Uint8Array(bench.asked.body ?? []);
  const hash = toHex(await sha256(bytes));
  const { whole, charges, messages } = recoveredFrom({ signed: openEnvelope(bytes), hash }, 0);
  const membership = newMembership(bench.state.membership.task, "code", 0);
  const state = await opened({ membership, whole, charges, messages, samples: [] });
  const said = openEnvelope(bytes).statement;
  equal(state.history.statement(), said, "the totals");
  const next = new Bench(state, bench.key, bench.server);
  await next.hears({ kind: "started" });
  await next.enrolled(200);
  await next.answers(200, toUtf8(TASK));
  await next.answers(200, bytes);
  equal([next.asks, next.state.ending], [null, null], "what it asks once it knows that message");
  await next.gives();
  await next.refuses(409, "seq-conflict", { expected: 2 });
  await next.answers(200, bytes);
  equal(openEnvelope(new Uint8Array(next.asked.body ?? [])).seq, 2, "the number that the server expects");
  equal(decode(openEnvelope(new Uint8Array(next.asked.body ?? [])).body), decode(openEnvelope(bytes).body), "its body");
  await next.receipts();
  await next.senses(7);
  equal(next.state.waiting[0].serial, 4, "serials go on behind those of the statement");
  holds(fromHex(hash).length === 32, "a hash");
}
