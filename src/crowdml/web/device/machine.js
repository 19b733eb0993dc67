/**
 * A device's life with one task, without I/O: `advance(state, event, context)` gives the next state and what is to be done.
 *
 * The order is the promise. Whether the budgets allow a step is asked before noise is drawn; its charges, the signed message
 * and the state are one write; and the request that sends these bytes comes after that write in the list of effects. What
 * carries effects out does them in order, and does nothing more once a write failed. Mirrors src/crowdml/device/runner.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./keys.js").Key} Key
 * @typedef {import("./noise.js").Source} Source
 * @typedef {import("./spending.js").Budget} Budget
 * @typedef {import("./spending.js").Charge} Charge
 * @typedef {import("./tasks.js").Task} Task
 * @typedef {import("./turn.js").Plan} Plan
 * @typedef {import("./turn.js").Publication} Publication
 *
 * @typedef {object} Membership what is on disk of a device's part in one task
 * @property {string} task its hash in hex, which the owner consented to
 * @property {string} code of the invitation
 * @property {string} consentedAt UTC
 * @property {Bytes | null} bytes of the task, once they were read and have that hash
 * @property {boolean} enrolled
 * @property {boolean} withdrawn
 * @property {number} seq of the last message that was signed
 * @property {number} trips check-ins that were charged
 * @property {{ first: number, served: number } | null} serving the batch that serves again, and how often it has
 *
 * @typedef {object} Whole what is on disk of the device, over all its tasks
 * @property {Bytes | null} serverKey
 * @property {number} nextSerial
 * @property {boolean} recovered whether its ledger began from a statement
 * @property {boolean} renewed whether its key is new, and an old one was lost: what that one gave cannot be known
 * @property {boolean} exhausted whether nobody knows what it gave: then it gives nothing more
 * @property {boolean} leaving whether its owner withdrew it, and the server has not said yet that it knows
 *
 * @typedef {object} Message one that was signed: the same bytes are sent until there is a receipt
 * @property {string} task
 * @property {number} seq
 * @property {string} hash in hex
 * @property {Bytes | null} bytes
 * @property {string} at UTC, when it was signed
 * @property {Bytes | null} receipt
 * @property {boolean} dropped whether the server refused it: it stays charged
 *
 * @typedef {{ readonly serial: number, readonly task: string, readonly x: Float32Array, readonly y: number,
 *   readonly tap: number }} Sample `tap` counts the owner's choices of a label
 * @typedef {{ readonly lines: number, readonly hash: string, readonly ends: boolean }} Place a line of a file that was
 *   read: the hash of all lines up to it, and whether reading stopped there
 *
 * @typedef {object} Records one transaction
 * @property {Membership} [membership]
 * @property {Whole} [whole]
 * @property {readonly Charge[]} [charges]
 * @property {readonly Message[]} [messages]
 * @property {readonly Sample[]} [samples]
 * @property {readonly number[]} [forget] serials of samples that have served
 * @property {readonly Place[]} [places]
 *
 * @typedef {{ readonly do: "write", readonly records: Records }} Write
 * @typedef {{ readonly do: "ask", readonly name: Question, readonly method: "GET" | "POST", readonly path: string,
 *   readonly body: Bytes | null, readonly headers: { readonly [name: string]: string }, readonly signed: boolean }} Ask
 * @typedef {{ readonly do: "wait", readonly milliseconds: number }} Wait
 * @typedef {{ readonly do: "tell", readonly what: "receipt" | "refused", readonly seq: number }} Tell
 * @typedef {Write | Ask | Wait | Tell} Effect
 * @typedef {"enrol" | "task" | "statement" | "publication" | "check-in" | "withdraw"} Question
 *
 * @typedef {{ readonly kind: "paused" } | { readonly kind: "resumed" } | { readonly kind: "withdrew" }
 *   | { readonly kind: "retried" }} Wish what an owner asks for by a button
 * @typedef {Wish | { readonly kind: "started" } | { readonly kind: "woken" } | { readonly kind: "unreachable" }
 *   | { readonly kind: "sensed", readonly samples: readonly { x: Float32Array, y: number }[], readonly tap: number,
 *       readonly places?: readonly Place[] }
 *   | { readonly kind: "relabelled", readonly tap: number, readonly y: number, readonly before: number }
 *   | { readonly kind: "answered", readonly status: number, readonly headers: { readonly [name: string]: string },
 *       readonly body: Bytes }} Event
 *
 * @typedef {"budget" | "exhausted" | "stopped" | "withdrawn" | "revoked" | "refused"} EndingKind
 * @typedef {{ readonly kind: EndingKind, readonly why: string, readonly detail: string }} Ending `why` names a sentence of
 *   the catalogue, or is the slug of a problem; `detail` is what the server or a check said
 *
 * @typedef {object} State
 * @property {Membership} membership
 * @property {Whole} whole
 * @property {History} history
 * @property {readonly Sample[]} waiting
 * @property {readonly Message[]} messages of this task
 * @property {ReadonlySet<string>} hashes of all messages of this device
 * @property {Task | null} task
 * @property {Plan | null} plan
 * @property {Question | null} asked the request that is under way
 * @property {boolean} resting whether a timer is set
 * @property {number} notBefore milliseconds
 * @property {number} failures requests in a row without an answer that helps
 * @property {number} refusals messages in a row that the server refused
 * @property {boolean} compared whether the ledger was held against the last message that the server has
 * @property {number | "fell" | null} doubt the number that the server expects, or that it says the totals fell
 * @property {{ tag: string, publication: Publication } | null} offer
 * @property {boolean} paused by the owner
 * @property {boolean} taskPaused
 * @property {boolean} leaving
 * @property {boolean} signsReads
 * @property {Ending | null} ending
 *
 * @typedef {object} Context what a machine does not have by itself
 * @property {Key} key
 * @property {number} now milliseconds since 1970
 * @property {() => number} chance uniform in [0, 1)
 * @property {Source} noise
 *
 * @typedef {{ readonly state: State, readonly effects: readonly Effect[] }} Step
 */

import { equalBytes, fromHex, sha256, toHex } from "./bytes.js";
import { openEnvelope, SERVER, signEnvelope, verifyEnvelope } from "./envelopes.js";
import { parseLoss } from "./losses.js";
import { samplePrice } from "./prices.js";
import { Problem } from "./problems.js";
import { answers, openReceipt, verifyReceipt } from "./receipts.js";
import { enrol, openEnrolled } from "./requests.js";
import { refuseTask } from "./sections.js";
import { History } from "./spending.js";
import { budgetsOf, readTask } from "./tasks.js";
import { chargesAhead, deviceTurn, planOf } from "./turn.js";

/** Messages in a row that a server may refuse before a device stops: something is wrong with one of the two. */
const MOST_REFUSALS = 3;
/** Milliseconds: the pause after a first failure, and the longest. */
const [FIRST_PAUSE, LONGEST_PAUSE] = [1000, 300_000];
/** Seconds: the latest that a server calls a device back, and the longest that it makes one wait. */
const [LATEST_NEXT, LONGEST_RETRY] = [86_400, 7 * 86_400];
/** Whole messages that are kept for their owner to look at; of older ones the hash and the receipt are kept. */
export const KEPT_MESSAGES = 20;
const MSGPACK = { "Content-Type": "application/msgpack" };

/** A membership as an owner's consent begins it. @param {string} task @param {string} code @param {number} now
 * @returns {Membership} */
export function newMembership(task, code, now) {
  return {
    task,
    code,
    consentedAt: new Date(now).toISOString(),
    bytes: null,
    enrolled: false,
    withdrawn: false,
    seq: 0,
    trips: 0,
    serving: null,
  };
}

/** @returns {Whole} */
export function newWhole() {
  return { serverKey: null, nextSerial: 0, recovered: false, renewed: false, exhausted: false, leaving: false };
}

/** A device as its store has it. @param {{ membership: Membership, whole: Whole, charges: readonly Charge[],
 * messages: readonly Message[], samples: readonly Sample[] }} found @returns {Promise<State>} */
export async function opened({ membership, whole, charges, messages, samples }) {
  const waiting = afterGap(samples.filter(({ task }) => task === membership.task));
  /** @type {State} */
  const state = {
    membership: serves(membership, waiting),
    whole,
    history: new History(charges),
    waiting,
    messages: messages.filter(({ task }) => task === membership.task).toSorted(bySeq),
    hashes: new Set(messages.map(({ hash }) => hash)),
    task: null,
    plan: null,
    asked: null,
    resting: false,
    notBefore: 0,
    failures: 0,
    refusals: 0,
    compared: false,
    doubt: null,
    offer: null,
    paused: false,
    taskPaused: false,
    leaving: whole.leaving && !membership.withdrawn,
    signsReads: false,
    ending: membership.withdrawn ? endingOf("withdrawn", "withdrawn") : null,
  };
  return membership.bytes === null ? state : { ...state, ...(await understood(membership.bytes, membership.task)) };
}

/** @param {Message} one @param {Message} other */
function bySeq(one, other) {
  return one.seq - other.seq || (one.at < other.at ? -1 : 1);
}

/** What a step does with an event, and what comes next. @param {State} state @param {Event} event
 * @param {Context} context @returns {Promise<Step>} */
export async function advance(state, event, context) {
  const heard = await hear(state, event, context);
  if (heard.state.ending !== null && !heard.state.leaving) return heard;
  const next = await proceed(heard.state, context);
  return { state: next.state, effects: [...heard.effects, ...next.effects] };
}

/** @param {State} state @param {Event} event @param {Context} context @returns {Promise<Step>} */
async function hear(state, event, context) {
  switch (event.kind) {
    case "sensed":
      return sense(state, event);
    case "relabelled":
      return relabel(state, event);
    case "answered":
      return state.asked === null
        ? still(state)
        : await answered({ ...state, asked: null }, state.asked, event, context);
    case "unreachable":
      return still(state.asked === null ? state : later({ ...state, asked: null }, context, null));
    case "woken":
      return still({ ...state, resting: false });
    case "paused":
      return still({ ...state, paused: true });
    case "resumed":
      return still({ ...state, paused: false });
    case "retried":
      return still(state.ending?.kind === "refused" ? triedAgain(state) : state);
    case "withdrew":
      return withdraw(state);
    case "started":
      return still(state);
  }
}

/** @param {State} state @returns {Step} */
function still(state) {
  return { state, effects: [] };
}

/** @param {State} state @returns {State} */
function triedAgain(state) {
  return { ...state, ending: null, failures: 0, refusals: 0, leaving: state.whole.leaving };
}

/** The owner's word is on disk before it is sent: a device that was closed meanwhile goes on with it, and with nothing
 * else. @param {State} state @returns {Step} */
function withdraw(state) {
  if (state.membership.withdrawn) return still(state);
  const whole = { ...state.whole, leaving: true };
  return {
    state: { ...state, whole, leaving: true, resting: false, notBefore: 0 },
    effects: [{ do: "write", records: { whole } }],
  };
}

/** What a device does when it is asked nothing: the first of these that is left to do. @param {State} state
 * @param {Context} context @returns {Promise<Step>} */
async function proceed(state, context) {
  if (state.asked !== null || state.resting || state.membership.withdrawn) return still(state);
  if (state.leaving) return await rested(state, context, () => ask(state, "withdraw", context));
  if (!state.membership.enrolled) return await rested(state, context, () => askEnrol(state, context.key));
  if (state.paused) return still(state);
  return await rested(state, context, () => work(state, context));
}

/** @param {State} state @param {Context} context @returns {Promise<Step> | Step} */
function work(state, context) {
  const { membership, plan, whole } = state;
  if (plan === null) return ask(state, "task", context);
  if (whole.exhausted) return ended(state, "exhausted", "exhausted");
  if (!state.compared) return ask(state, "statement", context);
  const [waits] = outbox(state);
  if (waits) return ask(state, "check-in", context, waits.bytes);
  const batch = batchOf(state);
  if (batch === null) return still(state);
  const cap = refusalOf(state, batch);
  if (cap === null) return ask(state, "publication", context);
  return membership.serving ? dropServed(state, batch) : ended(state, "budget", `cap-${cap}`);
}

/** Do it now, or after the pause that is asked for. @param {State} state @param {Context} context
 * @param {() => Promise<Step> | Step} act @returns {Promise<Step> | Step} */
function rested(state, { now }, act) {
  const milliseconds = Math.ceil(state.notBefore - now);
  if (milliseconds <= 0) return act();
  return { state: { ...state, resting: true }, effects: [{ do: "wait", milliseconds }] };
}

// --- samples ---

/** Samples enter while there is room; at a full buffer nothing is collected. Those that waited before another study took
 * serials are forgotten, so that what waits is one span. @param {State} state
 * @param {Extract<Event, { kind: "sensed" }>} event @returns {Step} */
function sense(state, { samples, tap, places }) {
  const taken = samples.slice(0, roomOf(state));
  if (!taken.length || state.ending !== null || state.leaving) return still(state);
  if (taken.some(({ x }) => x.length !== state.task?.features.dimension)) {
    throw new RangeError("This sample is of another study.");
  }
  const first = state.whole.nextSerial;
  const { task } = state.membership;
  const added = taken.map(({ x, y }, at) => ({ serial: first + at, task, x, y, tap }));
  const whole = { ...state.whole, nextSerial: first + added.length };
  const all = [...state.waiting, ...added];
  const waiting = afterGap(all);
  const forget = all.slice(0, all.length - waiting.length).map(({ serial }) => serial);
  const membership = serves(state.membership, waiting);
  const records = {
    whole,
    samples: added,
    ...(membership === state.membership ? {} : { membership }),
    ...(forget.length ? { forget } : {}),
    ...(places ? { places } : {}),
  };
  return { state: { ...state, membership, whole, waiting }, effects: [{ do: "write", records }] };
}

/** A membership whose batch under way is the one that waits, or none. @param {Membership} membership
 * @param {readonly Sample[]} waiting @returns {Membership} */
function serves(membership, waiting) {
  const { serving } = membership;
  return serving && waiting[0]?.serial !== serving.first ? { ...membership, serving: null } : membership;
}

/** How many samples more would be collected. @param {State} state @returns {number} */
export function roomOf({ plan, waiting }) {
  return plan === null ? 0 : Math.max(0, plan.buffer - waiting.length);
}

/** The owner takes a label back: samples that wait and were sensed since that tap belong to the one before. None is
 * dropped.
 * @param {State} state @param {Extract<Event, { kind: "relabelled" }>} event @returns {Step} */
function relabel(state, { tap, y, before }) {
  const first = state.membership.serving ? (state.plan?.batch ?? 0) : 0; // a batch that has served keeps its labels
  const waiting = state.waiting.map((
    each,
    at,
  ) => (at >= first && each.tap === tap ? { ...each, y, tap: before } : each));
  const changed = waiting.filter((each, at) => each !== state.waiting[at]);
  return {
    state: { ...state, waiting },
    effects: changed.length ? [{ do: "write", records: { samples: changed } }] : [],
  };
}

/** A batch is one span of serials: what lies before a gap is left out. @param {readonly Sample[]} samples */
function afterGap(samples) {
  const sorted = samples.toSorted((one, other) => one.serial - other.serial);
  const start = sorted.findLastIndex((each, at) => at > 0 && each.serial !== sorted[at - 1].serial + 1);
  return start < 0 ? sorted : sorted.slice(start);
}

/** The oldest batch, if one is full. @param {State} state @returns {readonly Sample[] | null} */
function batchOf({ plan, waiting }) {
  return plan !== null && waiting.length >= plan.batch ? waiting.slice(0, plan.batch) : null;
}

// --- budgets ---

/** The cap that the next check-in would break: asked before any noise is drawn, of all rows of the table.
 * @param {State} state @param {readonly Sample[]} batch */
function refusalOf(state, batch) {
  const { history, membership, task, plan } = state;
  if (task === null || plan === null) throw new Error("A check-in needs a task.");
  const charges = chargesAhead(task, plan, batch[0].serial, membership.trips);
  return history.refusal(task.id, charges, budgetsFor(state))?.cap ?? null;
}

/** The task's own budget. After a lost ledger nobody knows which task took what: then all of it counts.
 * @param {State} state @returns {Budget[]} */
export function budgetsFor({ task, plan, whole }) {
  if (task === null || plan === null) return [];
  const budgets = budgetsOf(task, samplePrice(plan.table, task.privacy.uses, task.privacy.delta));
  return whole.recovered ? budgets.map((budget) => ({ ...budget, task: null })) : budgets;
}

/** A batch that has served gives nothing more where a budget does not allow it: a fresh one has all of its epsilon.
 * @param {State} state @param {readonly Sample[]} batch @returns {Step} */
function dropServed(state, batch) {
  const membership = { ...state.membership, serving: null };
  const forget = batch.map(({ serial }) => serial);
  return {
    state: { ...state, membership, waiting: state.waiting.slice(batch.length) },
    effects: [{ do: "write", records: { membership, forget } }],
  };
}

// --- a check-in ---

/** Draw, charge, sign, write; then the same bytes are sent. @param {State} state @param {Publication} publication
 * @param {Context} context @returns {Promise<Step>} */
async function contribute(state, publication, { key, noise, now }) {
  const { history, membership, task, plan } = state;
  const batch = batchOf(state);
  if (state.paused || state.leaving) return still(state);
  if (task === null || plan === null || batch === null || refusalOf(state, batch) !== null) return still(state);
  if (batch.some(({ serial }, at) => serial !== batch[0].serial + at)) {
    throw new Error("A batch is one span of serials.");
  }
  const samples = { x: batch.map(({ x }) => x), y: batch.map(({ y }) => y) };
  const given = { samples, publication, first: batch[0].serial, trip: membership.trips };
  const turn = deviceTurn(task, plan, given, noise);
  if (turn.body === null) throw new Error("This task is masked.");
  const seq = membership.seq + 1;
  const statement = history.statement(turn.charges);
  const envelope = { task: task.hash, sender: key.id, to: [SERVER], seq, kind: turn.kind, body: turn.body, statement };
  const message = await sealed(membership.task, seq, await signEnvelope(envelope, key), now);
  const served = (membership.serving?.served ?? 0) + 1;
  const again = served < task.privacy.uses && !turn.ends;
  const serving = again ? { first: batch[0].serial, served } : null;
  const next = { ...membership, seq, trips: membership.trips + 1, serving };
  const forget = again ? [] : batch.map(({ serial }) => serial);
  return {
    state: {
      ...state,
      membership: next,
      history: charged(history, turn.charges),
      waiting: again ? state.waiting : state.waiting.slice(batch.length),
      messages: [...state.messages, message],
      hashes: new Set([...state.hashes, message.hash]),
    },
    effects: [{ do: "write", records: { membership: next, charges: turn.charges, messages: [message], forget } }],
  };
}

/** @param {string} task @param {number} seq @param {Bytes} bytes @param {number} now @returns {Promise<Message>} */
async function sealed(task, seq, bytes, now) {
  const at = new Date(now).toISOString();
  return { task, seq, hash: toHex(await sha256(bytes)), bytes, at, receipt: null, dropped: false };
}

/** A history with more charges; the one before stays as it is. @param {History} history
 * @param {readonly Charge[]} charges @returns {History} */
function charged(history, charges) {
  const grown = new History();
  grown.charges = [...history.charges];
  grown.spent = new Map(history.spent);
  grown.add(charges);
  return grown;
}

/** What waits for its receipt, oldest first. @param {State} state
 * @returns {(Message & { bytes: Bytes })[]} */
function outbox({ messages }) {
  return messages.flatMap((
    each,
  ) => (each.receipt || each.dropped || !each.bytes ? [] : [{ ...each, bytes: each.bytes }]));
}

// --- asking ---

/** @param {State} state @param {Key} key @returns {Promise<Step>} */
async function askEnrol(state, key) {
  const { body, signature } = await enrol(key, state.membership.code, [state.membership.task]);
  const headers = { ...MSGPACK, "Crowdml-Signature": signature };
  return request(state, { name: "enrol", method: "POST", path: "/v1/devices", body, headers, signed: false });
}

/** @param {State} state @param {Exclude<Question, "enrol">} name @param {Context} context @param {Bytes | null} [body]
 * @returns {Step} */
function ask(state, name, { key }, body = null) {
  const task = `/v1/tasks/${state.membership.task}`;
  const device = `/v1/devices/${key.id}`;
  /** @type {{ [name: string]: string }} */
  const tag = state.offer ? { "If-None-Match": state.offer.tag } : {};
  /** @type {{ [name: string]: Omit<Ask, "do" | "name" | "body"> }} */
  const questions = {
    "task": { method: "GET", path: task, headers: {}, signed: state.signsReads },
    "statement": { method: "GET", path: `${device}/statement`, headers: {}, signed: true },
    "publication": { method: "GET", path: `${task}/publication`, headers: tag, signed: state.signsReads },
    "check-in": { method: "POST", path: `${task}/check-in`, headers: MSGPACK, signed: false },
    "withdraw": { method: "POST", path: `${device}/withdraw`, headers: {}, signed: true },
  };
  return request(state, { name, body, ...questions[name] });
}

/** @param {State} state @param {Omit<Ask, "do">} question @returns {Step} */
function request(state, question) {
  return { state: { ...state, asked: question.name }, effects: [{ do: "ask", ...question }] };
}

/** After a failure: later and later, at least as late as the server asks, and spread by chance.
 * @param {State} state @param {Context} context @param {number | null} seconds @returns {State} */
function later(state, { now, chance }, seconds) {
  const grown = Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** Math.min(state.failures, 30));
  const pause = seconds === null ? grown * (0.5 + 0.5 * chance()) : 1000 * seconds + grown * chance();
  return { ...state, failures: state.failures + 1, notBefore: now + pause };
}

// --- answers ---

/** @param {State} state @param {Question} name @param {Extract<Event, { kind: "answered" }>} answer
 * @param {Context} context @returns {Promise<Step>} */
async function answered(state, name, answer, context) {
  if (answer.status < 400) {
    const fine = { ...state, failures: 0, taskPaused: false };
    try {
      return await accepted[name](fine, answer, context);
    } catch (error) {
      if (error instanceof Problem) return ended(state, "refused", `bad-${name}`, error.message);
      throw error;
    }
  }
  const problem = problemOf(answer);
  const { slug, retryAfter } = problem;
  if (["closed", "authorization"].includes(slug) && !state.signsReads) return still({ ...state, signsReads: true });
  if (slug === "task-paused") {
    const pause = 1000 * (retryAfter ?? 1) * (1 + context.chance());
    return still({ ...state, taskPaused: true, notBefore: context.now + pause });
  }
  if (answer.status === 408 || answer.status === 429 || answer.status >= 500) {
    return still(later(state, context, retryAfter));
  }
  return refused[name] ? await refused[name](state, problem, context) : ended(state, ...finalOf(problem));
}

/** @type {{ [name in Question]: (state: State, answer: Extract<Event, { kind: "answered" }>, context: Context) =>
 *   Promise<Step> | Step }} */
const accepted = {
  "enrol": enrolled,
  "task": readTaskOf,
  "statement": compared,
  "publication": checkedOut,
  "check-in": received,
  "withdraw": withdrawn,
};

/** What answers a refusal, where it is more than an end. @type {{ [name in Question]?: (state: State,
 *   problem: Refusal, context: Context) => Promise<Step> | Step }} */
const refused = {
  "check-in": refusedCheckIn,
  "statement": (state, problem, context) =>
    isUnknownStatement(problem) ? afterComparing(state, null, context) : ended(state, ...finalOf(problem)),
  "withdraw": (state, problem) =>
    ["withdrawn", "unknown-device"].includes(problem.slug)
      ? withdrawn(state)
      : ended({ ...state, leaving: false }, ...finalOf(problem)), // its owner may try again
};

/** @param {State} state @param {{ status: number, body: Bytes }} answer @param {Context} context @returns {Step} */
function enrolled(state, { status, body }, { key }) {
  const found = openEnrolled(body);
  if (found.device !== key.id || !found.tasks.includes(state.membership.task)) {
    return ended(state, "refused", "not-admitted");
  }
  const known = state.whole.serverKey;
  if (known !== null && !equalBytes(known, found.serverKey)) return ended(state, "refused", "other-server");
  const whole = { ...state.whole, serverKey: found.serverKey };
  const membership = { ...state.membership, enrolled: true };
  return {
    // a server that never knew the device has no message of it to compare with
    state: { ...state, whole, membership, compared: state.compared || status === 201 },
    effects: [{ do: "write", records: { whole, membership } }],
  };
}

/** @param {State} state @param {{ body: Bytes }} answer @returns {Promise<Step>} */
async function readTaskOf(state, { body }) {
  const known = await understood(body, state.membership.task);
  const trips = Math.max(state.membership.trips, tripsAtMost(known, state.whole));
  const membership = { ...state.membership, bytes: body, trips };
  return { state: { ...state, ...known, membership }, effects: [{ do: "write", records: { membership } }] };
}

/** How many check-ins of a schedule a device may have made whose ledger was lost: as many as its samples allowed.
 * @param {{ task: Task, plan: Plan }} known @param {Whole} whole @returns {number} */
function tripsAtMost({ task, plan }, { nextSerial, recovered }) {
  const scheduled = Object.values(plan.table).some(({ schedule }) => schedule !== null);
  return scheduled && recovered ? Math.floor((nextSerial * task.privacy.uses) / plan.batch) : 0;
}

/** The task behind its bytes, if they have the hash that was consented to and a browser can take part.
 * @param {Bytes} bytes @param {string} hash @returns {Promise<{ task: Task, plan: Plan }>} */
export async function understood(bytes, hash) {
  const task = await readTask(bytes, fromHex(hash));
  if (task.masking) refuseTask("it adds devices up under masks");
  if (!task.privacy.budget) refuseTask("it sets no budget");
  const plan = await planOf(task);
  return { task, plan };
}

/** @param {State} state @param {{ headers: { readonly [name: string]: string }, status: number, body: Bytes }} answer
 * @param {Context} context @returns {Promise<Step>} */
async function checkedOut(state, { headers, status, body }, context) {
  const { plan } = state;
  if (plan === null) return still(state);
  const said = headers["crowdml-state"];
  if (said === "stopped") return ended(state, "stopped", "task-stopped");
  const rests = { ...state, notBefore: nextWindow(headers, context) };
  if (said === "paused") {
    const pause = Math.max(1000, rests.notBefore - context.now) * (1 + context.chance());
    return still({ ...rests, taskPaused: true, notBefore: context.now + pause });
  }
  if (status === 304 && state.offer) return await contribute(rests, state.offer.publication, context);
  if (headers["crowdml-kind"] !== plan.published) throw new Problem("malformed", "The publication is of another kind.");
  const publication = plan.read(body);
  if (!publication.weights.every(Number.isFinite)) throw new Problem("malformed", "The publication is not finite.");
  const offer = headers.etag ? { tag: headers.etag, publication } : null;
  return await contribute({ ...rests, offer }, publication, context);
}

/** When the server wants the device back, spread by half of that. @param {{ readonly [name: string]: string }} headers
 * @param {Context} context */
function nextWindow(headers, { now, chance }) {
  const seconds = Math.min(wholeNumber(headers["crowdml-next"]) ?? 0, LATEST_NEXT);
  return now + 1000 * seconds * (0.5 + chance());
}

/** The receipt is for these bytes, and the server that this device knows signed it. @param {State} state
 * @param {{ headers: { readonly [name: string]: string }, body: Bytes }} answer @param {Context} context */
async function received(state, { headers, body }, context) {
  const [message] = outbox(state);
  const receipt = openReceipt(body);
  const task = fromHex(message.task);
  const sent = { task, device: context.key.id, seq: message.seq, hash: fromHex(message.hash) };
  if (!answers(receipt, sent)) return ended(state, "refused", "receipt-of-another");
  if (state.whole.serverKey === null || !(await verifyReceipt(receipt, state.whole.serverKey))) {
    return ended(state, "refused", "receipt-forged");
  }
  const old = state.messages.filter((each) => each.receipt && each.bytes).slice(0, -KEPT_MESSAGES + 1);
  const changed = [{ ...message, receipt: body }, ...old.map(withoutBytes)];
  /** @type {Effect[]} */
  const effects = [{ do: "write", records: { messages: changed } }, { do: "tell", what: "receipt", seq: message.seq }];
  const next = { ...state, messages: replaced(state.messages, changed), refusals: 0 };
  return { state: { ...next, notBefore: nextWindow(headers, context) }, effects };
}

/** @param {Message} message @returns {Message} */
function withoutBytes(message) {
  return { ...message, bytes: null };
}

/** @param {readonly Message[]} messages @param {readonly Message[]} changed */
function replaced(messages, changed) {
  const by = new Map(changed.map((each) => [each.hash, each]));
  return messages.map((each) => by.get(each.hash) ?? each);
}

/** @param {State} state @returns {Step} */
function withdrawn(state) {
  const membership = { ...state.membership, withdrawn: true };
  const whole = { ...state.whole, leaving: false };
  const forget = state.waiting.map(({ serial }) => serial);
  return {
    state: { ...state, membership, whole, waiting: [], leaving: false, ending: endingOf("withdrawn", "withdrawn") },
    effects: [{ do: "write", records: { membership, whole, forget } }],
  };
}

// --- refusals ---

/** @typedef {{ status: number, slug: string, detail: string, retryAfter: number | null, expected: number | null }} Refusal */

/** @param {{ status: number, headers: { readonly [name: string]: string }, body: Bytes }} answer @returns {Refusal} */
function problemOf({ status, headers, body }) {
  /** @type {{ [name: string]: unknown }} */
  let found = {};
  try {
    found = JSON.parse(new TextDecoder().decode(body)) ?? {};
  } catch {
    // whatever stands between the device and the server: the status says enough
  }
  const seconds = wholeNumber(headers["retry-after"]);
  const type = typeof found.type === "string" ? found.type : "";
  const { expected } = found;
  return {
    status,
    slug: type.startsWith("/problems/") ? type.slice("/problems/".length, 70) : "",
    detail: typeof found.detail === "string" ? found.detail.slice(0, 400) : "",
    retryAfter: seconds === null ? null : Math.min(seconds, LONGEST_RETRY),
    expected: typeof expected === "number" && Number.isSafeInteger(expected) && expected >= 1 ? expected : null,
  };
}

/** @param {string | undefined} text @returns {number | null} */
function wholeNumber(text) {
  return text !== undefined && /^[0-9]{1,9}$/.test(text) ? Number(text) : null;
}

/** @param {Refusal} problem @returns {[EndingKind, string, string]} */
function finalOf({ slug, detail }) {
  /** @type {{ [slug: string]: EndingKind }} */
  const kinds = { "task-stopped": "stopped", "withdrawn": "withdrawn", "revoked": "revoked" };
  return [kinds[slug] ?? "refused", slug || "refused", detail];
}

/** @param {State} state @param {Refusal} problem @returns {Step} */
function refusedCheckIn(state, problem) {
  const { status, slug, expected, detail } = problem;
  const counted = { ...state, refusals: state.refusals + 1 };
  if (counted.refusals > MOST_REFUSALS) return ended(state, "refused", "many-refusals", detail);
  if (slug === "totals-fell") return still({ ...state, doubt: "fell", compared: false });
  if (status === 409 && expected !== null) return still({ ...counted, doubt: expected, compared: false });
  if (status === 413 || (status === 422 && slug !== "stale")) return ended(state, "refused", slug, detail);
  if (status !== 400 && status !== 422 && !slug.startsWith("round-")) return ended(state, ...finalOf(problem));
  const [message] = outbox(state);
  const membership = { ...state.membership, seq: message.seq - 1 }; // its number is not used up; it stays charged
  const messages = [{ ...message, dropped: true }];
  return {
    state: { ...counted, membership, messages: replaced(state.messages, messages), offer: null },
    effects: [{ do: "write", records: { membership, messages } }, { do: "tell", what: "refused", seq: message.seq }],
  };
}

// --- an older ledger ---

/** @param {Refusal} problem */
function isUnknownStatement({ status, slug }) {
  return status === 404 || status === 405 || ["unknown-device", "revoked", "withdrawn"].includes(slug);
}

/** Whether an answer says that the server has no message of this device: nothing else that a server or what stands
 * before it may say does. @param {{ status: number, headers: { readonly [name: string]: string }, body: Bytes }} answer */
export function hasNone(answer) {
  const { slug } = problemOf(answer);
  return answer.status >= 400 && ["not-found", "unknown-device", "revoked", "withdrawn"].includes(slug);
}

/** Hold the ledger against the last message that the server has of this device. One that the ledger does not know proves
 * that it is an older copy: then this device gives nothing more. @param {State} state @param {{ body: Bytes }} answer
 * @param {Context} context @returns {Promise<Step>} */
async function compared(state, { body }, context) {
  const shown = await openOwn(body, context.key);
  if (shown === null || state.hashes.has(shown.hash)) return afterComparing(state, shown, context);
  const whole = { ...state.whole, exhausted: true };
  return {
    state: { ...state, whole, ending: endingOf("exhausted", "copied") },
    effects: [{ do: "write", records: { whole } }],
  };
}

/** The message in these bytes, if this device signed it and had given samples by then. @param {Bytes} bytes
 * @param {Key} key */
export async function openOwn(bytes, key) {
  try {
    const signed = openEnvelope(bytes);
    if (!(await verifyEnvelope(signed, key.public)) || !signed.statement.samples) return null;
    return { signed, hash: toHex(await sha256(bytes)) };
  } catch (error) {
    if (error instanceof Problem) return null;
    throw error;
  }
}

/** The ledger knows all that the server can prove. What the server only said is no proof: it ends this run and no more,
 * unless the server has fewer messages than the ledger, as after it was restored.
 * @param {State} state @param {Awaited<ReturnType<typeof openOwn>>} shown @param {Context} context
 * @returns {Promise<Step> | Step} */
function afterComparing(state, shown, context) {
  const { doubt } = state;
  const next = { ...state, compared: true, doubt: null };
  if (doubt === null) return still(next);
  if (doubt === "fell") return ended(next, "refused", "totals-fell");
  const known = Math.max(0, ...state.messages.filter(({ receipt }) => receipt).map(({ seq }) => seq));
  const isShown = shown !== null && toHex(shown.signed.task) === state.membership.task &&
    Number(shown.signed.seq) === doubt - 1;
  if (doubt - 1 > known && !isShown && !state.whole.recovered) return ended(next, "refused", "seq-conflict");
  return renumbered(next, doubt, context);
}

/** The server never took these bytes under their number: the same release, under the number it expects. No noise is drawn
 * and nothing is charged again. @param {State} state @param {number} seq @param {Context} context
 * @returns {Promise<Step>} */
async function renumbered(state, seq, { key, now }) {
  const [old] = outbox(state);
  const { data: _, ...envelope } = openEnvelope(old.bytes);
  const message = await sealed(old.task, seq, await signEnvelope({ ...envelope, seq }, key), now);
  const gone = { ...old, dropped: true };
  const membership = { ...state.membership, seq };
  return {
    state: {
      ...state,
      membership,
      messages: [...replaced(state.messages, [gone]), message],
      hashes: new Set([...state.hashes, message.hash]),
    },
    effects: [{ do: "write", records: { membership, messages: [gone, message] } }],
  };
}

// --- a lost ledger ---

/** @param {readonly string[]} losses @param {string} kind */
function lossOf(losses, kind) {
  return losses.find((text) => text.startsWith(kind)) ?? `${kind} 0`;
}

/** What a new ledger begins with after the old one was lost and the key was not: one charge of each kind of loss on as
 * many samples as were given, each as dear as the dearest was. @param {NonNullable<Awaited<ReturnType<typeof openOwn>>>} shown
 * @param {number} now @returns {Required<Pick<Records, "whole" | "charges" | "messages">>} */
export function recoveredFrom({ signed, hash }, now) {
  const { dearest, device, samples } = signed.statement;
  const task = toHex(signed.task);
  const kinds = new Set([...dearest, ...device].map((text) => text.split(" ")[0]));
  const charges = [...kinds].map((kind) => ({
    task,
    row: "recovered",
    loss: parseLoss(lossOf(dearest, kind)),
    deviceLoss: parseLoss(lossOf(device, kind)),
    first: 0,
    last: samples - 1,
  }));
  const at = new Date(now).toISOString();
  const message = { task, seq: Number(signed.seq), hash, bytes: signed.data, at, receipt: null, dropped: true };
  const whole = { ...newWhole(), nextSerial: samples, recovered: true };
  return { whole, charges, messages: [/** @type {Message} */ (message)] };
}

// --- endings ---

/** @param {EndingKind} kind @param {string} why @param {string} [detail] @returns {Ending} */
function endingOf(kind, why, detail = "") {
  return { kind, why, detail };
}

/** @param {State} state @param {EndingKind} kind @param {string} why @param {string} [detail] @returns {Step} */
function ended(state, kind, why, detail = "") {
  return still({ ...state, ending: endingOf(kind, why, detail) });
}
