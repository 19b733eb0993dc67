/**
 * A device in a Worker: carries out what the machine asks for, with the store, `fetch` and a lock. The page that started it
 * shows what it is told. Two tabs are one device: the second waits until the first is closed.
 *
 * @typedef {import("./machine.js").Context} Context
 * @typedef {import("./machine.js").Effect} Effect
 * @typedef {import("./machine.js").Event} Event
 * @typedef {import("./machine.js").State} State
 * @typedef {import("./view.js").View} View
 *
 * @typedef {{ readonly kind: "open", readonly offers: readonly string[] }
 *   | { readonly kind: "switch", readonly task: string }
 *   | { readonly kind: "look", readonly task: string }
 *   | { readonly kind: "consent", readonly task: string, readonly code: string }
 *   | { readonly kind: "window", readonly task: string, readonly magnitudes: Float64Array, readonly y: number,
 *       readonly tap: number }
 *   | { readonly kind: "file", readonly task: string, readonly bytes: Uint8Array<ArrayBuffer> }
 *   | { readonly kind: "new-rows", readonly task: string }
 *   | { readonly kind: "erase" }
 *   | import("./machine.js").Wish | Extract<Event, { kind: "relabelled" }>} Told by the page
 *
 * @typedef {{ readonly task: string, readonly title: string }} Other a study that this device joined, too
 *
 * @typedef {{ readonly kind: "elsewhere" }
 *   | { readonly kind: "none", readonly lost: "key" | "ledger" | null }
 *   | { readonly kind: "looked", readonly task: string, readonly why: string | null, readonly detail: string,
 *       readonly price: { readonly sample: number, readonly device: number } | null }
 *   | { readonly kind: "view", readonly view: View & { readonly others: readonly Other[] } }
 *   | { readonly kind: "told", readonly what: string, readonly seq: number }
 *   | { readonly kind: "file", readonly rows: number, readonly given: number, readonly faults: import("./lines.js").Faults | null,
 *       readonly why: string | null, readonly asks: boolean }
 *   | { readonly kind: "erased" }
 *   | { readonly kind: "broken", readonly detail: string }} Said to the page
 */

import { prepareRow } from "./features.js";
import { generateKey } from "./keys.js";
import { firstLine, readFile } from "./lines.js";
import * as machine from "./machine.js";
import { noiseFrom, systemEntropy } from "./noise.js";
import { Problem } from "./problems.js";
import { authorize } from "./requests.js";
import { spectrum } from "./spectrum.js";
import { KEYS, LEDGER, Store } from "./store.js";
import { priceOf, viewOf } from "./view.js";

const LOCK = "crowdml-device";
/** Milliseconds after which an answer that has not come will not come. */
const LONGEST_ANSWER = 60_000;
/** Rows of a file that are handed to the machine at once. */
const ROWS_AT_ONCE = 256;

/** @type {Store | null} */
let store = null;
/** @type {import("./keys.js").Key | null} */
let key = null;
/** @type {State | null} */
let state = null;
/** @type {import("./store.js").Found | null} */
let found = null;
/** Rows of a file that were not handed over yet, and the study they are for. A file that this device does not know waits
 * until its owner says that its rows are new. @type {{ task: string, reading: import("./lines.js").Reading, asks: boolean } | null} */
let file = null;
/** Tasks whose price this browser computed: no other is consented to. @type {Set<string>} */
const priced = new Set();
/** Counts the studies that this Worker went on with: an answer to one of them is not heard by the next. */
let generation = 0;
/** What has to be done, one after another. @type {Promise<void>} */
let queue = Promise.resolve();
let isBroken = false;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let timer;

/** @param {Said} said */
function say(said) {
  postMessage(said);
}

addEventListener("message", ({ data }) => {
  const told = /** @type {Told} */ (data);
  later(() => obey(told));
});

/** @param {() => Promise<void>} work */
function later(work) {
  queue = queue.then(() => (isBroken ? undefined : work())).catch(broken);
}

/** @param {unknown} error */
function broken(error) {
  isBroken = true;
  clearTimeout(timer);
  say({ kind: "broken", detail: error instanceof Error ? `${error.name}: ${error.message}` : String(error) });
}

/** @param {Told} told @returns {Promise<void>} */
async function obey(told) {
  switch (told.kind) {
    case "open":
      return await open(told.offers);
    case "switch":
      return await load([told.task]);
    case "look":
      return await look(told.task);
    case "consent":
      return await consent(told.task, told.code);
    case "window":
      return await sense(told);
    case "file":
      return await bring(told);
    case "new-rows":
      return await takeNew(told.task);
    case "erase":
      return await erase();
    default:
      return await hear(told);
  }
}

// --- the device ---

/** Be this origin's device, as soon as no other tab is. @param {readonly string[]} offers tasks that the page invites to */
async function open(offers) {
  await new Promise((resolve) => {
    /** @param {Lock | null} lock @returns {Promise<void>} */
    const held = (lock) => {
      if (lock === null) {
        say({ kind: "elsewhere" });
        navigator.locks.request(LOCK, held);
        return Promise.resolve();
      }
      resolve(null);
      return new Promise(() => {}); // until this Worker ends
    };
    navigator.locks.request(LOCK, { ifAvailable: true }, held);
  });
  store = await Store.open();
  await load(offers);
}

/** Go on with a task that this device joined: one of those that the page invites to, or the newest where it invites to
 * none. @param {readonly string[]} offers */
async function load(offers) {
  if (store === null) return;
  leave();
  const identity = await store.identity();
  found = await store.read();
  key = identity.key;
  if (key !== null && identity.mark !== null && found.whole === null) {
    await recover(identity.mark);
    found = await store.read();
    if (!found.memberships.length) return say({ kind: "none", lost: "ledger" });
  }
  const joined = found.memberships.toSorted((one, other) => (one.consentedAt < other.consentedAt ? 1 : -1));
  const isLeaving = found.whole?.leaving ?? false; // whatever the page invites to: the server has to know first
  const membership = joined.find((each) =>
    isLeaving || !offers.length || (offers.includes(each.task) && each.enrolled)
  );
  if (!membership) return say({ kind: "none", lost: null });
  if (key === null) return say({ kind: "none", lost: "key" });
  await begin(membership, found.whole ?? machine.newWhole());
}

/** Go on with no study: what was asked or brought for one is for that one alone. */
function leave() {
  clearTimeout(timer);
  generation += 1;
  [state, file] = [null, null];
}

/** @param {import("./machine.js").Membership} membership @param {import("./machine.js").Whole} whole */
async function begin(membership, whole) {
  if (found === null) return;
  leave();
  const { charges, messages, samples } = found;
  const withdrawn = hasWithdrawn(found.memberships);
  state = await machine.opened({ membership: { ...membership, withdrawn }, whole, charges, messages, samples });
  await hear({ kind: "started" });
}

/** Whoever withdraws, withdraws from all: the server takes nothing more from this key.
 * @param {readonly import("./machine.js").Membership[]} memberships */
function hasWithdrawn(memberships) {
  return memberships.some(({ withdrawn }) => withdrawn);
}

/** The owner accepted what a task asks: pinned to the task's hash. @param {string} task @param {string} code */
async function consent(task, code) {
  if (store === null || !priced.has(task)) return;
  leave();
  found = await store.read();
  let whole = found.whole ?? machine.newWhole();
  const over = hasWithdrawn(found.memberships);
  if (whole.leaving && !over) return await load([]);
  if (key === null || over) {
    if (found.whole !== null) whole = await beginAnew(!over);
    key = await generateKey();
    await store.keepKey(key);
  }
  const known = found.memberships.find((each) => each.task === task && each.enrolled);
  const membership = known ? { ...known, code } : machine.newMembership(task, code, Date.now());
  await store.write({ membership, whole });
  found = await store.read();
  await begin(membership, whole);
}

/** The key is gone, or has withdrawn: this is a new device. How far files were read stays known.
 * @param {boolean} renewed whether nobody knows what the old one gave */
async function beginAnew(renewed) {
  const places = found?.places ?? [];
  store?.ledger.close();
  await deleteDatabase(LEDGER);
  store = await Store.open();
  const whole = { ...machine.newWhole(), renewed };
  await store.write({ places });
  found = { whole, memberships: [], charges: [], messages: [], samples: [], places };
  return whole;
}

/** @param {string} name @returns {Promise<void>} */
function deleteDatabase(name) {
  const request = indexedDB.deleteDatabase(name);
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve());
    request.addEventListener("error", () => reject(request.error));
  });
}

/** The ledger is gone and the key is not: begin from the last statement that this device signed, where the server has the
 * one that was marked. Where it has none or an older one, nobody knows what was given. @param {import("./store.js").Mark} mark */
async function recover(mark) {
  if (store === null || key === null) return;
  const path = `/v1/devices/${key.id}/statement`;
  const answer = await fetched({ method: "GET", path, body: null, headers: {}, signed: true });
  if (answer.status !== 200 && !machine.hasNone(answer)) {
    throw new Error(`The server answers ${answer.status}. Nothing was decided: open this page again later.`);
  }
  const shown = answer.status === 200 ? await machine.openOwn(answer.body, key) : null;
  if (shown !== null && shown.hash === mark.hash) {
    await store.write(machine.recoveredFrom(shown, Date.now()), shown.signed.statement.samples);
  } else {
    await store.write({ whole: { ...machine.newWhole(), exhausted: true, recovered: true } });
  }
}

async function erase() {
  leave();
  await store?.erase();
  [store, key, found] = [null, null, null];
  for (const name of [LEDGER, KEYS]) await deleteDatabase(name);
  say({ kind: "erased" });
}

// --- the machine ---

/** @returns {Context} */
function context() {
  if (key === null) throw new Error("This device has no key.");
  return { key, now: Date.now(), chance, noise: noiseFrom() };
}

/** Uniform in [0, 1). @returns {number} */
function chance() {
  const view = new DataView(systemEntropy(8).buffer);
  return Number(view.getBigUint64(0) >> 11n) / 2 ** 53;
}

/** One step: what the machine makes of an event is done in its order. @param {Event} event */
async function hear(event) {
  if (state === null) return;
  const step = await machine.advance(state, event, context());
  for (const effect of step.effects) {
    if (effect.do === "write") await store?.write(effect.records, step.state.history.of(null).samples);
    else carryOut(effect);
  }
  state = step.state;
  show();
  await feed();
}

/** @param {Exclude<Effect, { do: "write" }>} effect */
function carryOut(effect) {
  if (effect.do === "wait") {
    clearTimeout(timer);
    timer = setTimeout(heardBy(generation, { kind: "woken" }), Math.min(effect.milliseconds, 2 ** 31 - 1));
  } else if (effect.do === "tell") {
    say({ kind: "told", what: effect.what, seq: effect.seq });
  } else {
    const asking = generation;
    fetched(effect).then(
      (answer) => heardBy(asking, { kind: "answered", ...answer })(),
      heardBy(asking, { kind: "unreachable" }),
    );
  }
}

/** Hear an event when its turn comes, unless this Worker goes on with another study by then. @param {number} asking
 * @param {Event} event @returns {() => void} */
function heardBy(asking, event) {
  return () => later(() => (asking === generation ? hear(event) : Promise.resolve()));
}

/** @param {Pick<import("./machine.js").Ask, "method" | "path" | "body" | "headers" | "signed">} question */
async function fetched({ method, path, body, headers, signed }) {
  const sent = { ...headers };
  if (signed && key !== null) {
    sent.Authorization = await authorize(
      key,
      method,
      path,
      body ? new Uint8Array(body) : new Uint8Array(),
      Date.now() / 1000,
    );
  }
  const answer = await fetch(path, {
    ...(body === null ? { method } : { method, body: new Uint8Array(body) }),
    headers: sent,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
    referrerPolicy: "no-referrer",
    signal: AbortSignal.timeout(LONGEST_ANSWER),
  });
  const got = new Uint8Array(await answer.arrayBuffer());
  return { status: answer.status, headers: Object.fromEntries(answer.headers), body: got };
}

function show() {
  if (state === null) return;
  const others = (found?.memberships ?? []).flatMap(({ task, bytes }) => {
    return bytes === null || task === state?.membership.task ? [] : [{ task, title: titleOf(bytes) }];
  });
  const rows = file?.reading.rows.length ?? null;
  say({ kind: "view", view: { ...viewOf(state, { now: Date.now(), id: key?.id ?? "", rows }), others } });
}

/** @param {Uint8Array} bytes of a task that was read before @returns {string} */
function titleOf(bytes) {
  const { title, name } = JSON.parse(new TextDecoder().decode(bytes));
  return String(title || name);
}

// --- before consent ---

/** Whether a browser can take part in a task, and what it costs as this browser computes it. @param {string} task */
async function look(task) {
  const question = {
    method: /** @type {const} */ ("GET"),
    path: `/v1/tasks/${task}`,
    body: null,
    headers: {},
    signed: false,
  };
  const answer = await fetched(question).catch(() => ({ status: 0, body: new Uint8Array() }));
  if (answer.status === 401) return say({ kind: "looked", task, why: "closed", detail: "", price: null });
  if (answer.status !== 200) return say({ kind: "looked", task, why: "unreachable", detail: "", price: null });
  try {
    const known = await machine.understood(answer.body, task);
    priced.add(task);
    say({ kind: "looked", task, why: null, detail: "", price: priceOf(known.task, known.plan) });
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    say({ kind: "looked", task, why: error.slug, detail: error.message, price: null });
  }
}

// --- samples ---

/** @param {Extract<Told, { kind: "window" }>} told */
async function sense({ task, magnitudes, y, tap }) {
  if (task !== state?.membership.task || state.task?.features.kind !== "accelerometer-spectrum") return;
  const x = prepareRow(state.task.features, spectrum(magnitudes));
  await hear({ kind: "sensed", samples: [{ x, y }], tap });
}

/** Rows of a file: those that this device has read before are left out. @param {Extract<Told, { kind: "file" }>} told */
async function bring({ task, bytes }) {
  file = null;
  if (task !== state?.membership.task || state.task?.features.kind !== "vector" || store === null) return;
  const why = firstLine(bytes, state.task);
  if (why !== null) return say({ kind: "file", rows: 0, given: 0, faults: null, why, asks: false });
  const { places } = await store.read();
  const reading = await readFile(bytes, state.task, places);
  file = { task, reading, asks: !reading.goesOn };
  const { rows, given, faults } = reading;
  say({ kind: "file", rows: rows.length, given, faults, why: null, asks: file.asks });
  await feed();
}

/** The owner says that no row of the file which waits was given before. @param {string} task */
async function takeNew(task) {
  if (file?.task !== task) return;
  file.asks = false;
  await feed();
}

/** Hand over as many rows as there is room for. */
async function feed() {
  if (file === null || state === null || file.asks || file.task !== state.membership.task) return;
  const { reading } = file;
  if (state.ending !== null || state.leaving || !reading.rows.length) return;
  const room = Math.min(machine.roomOf(state), ROWS_AT_ONCE);
  if (!room) return;
  const rows = reading.rows.splice(0, room);
  const places = await reading.placesAfter(rows.length);
  await hear({ kind: "sensed", samples: rows, tap: 0, places });
}
