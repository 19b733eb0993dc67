/**
 * What an owner is shown of a device: numbers and names of sentences, from the machine's state. No sample is in it.
 *
 * @typedef {import("./machine.js").State} State
 * @typedef {import("./tasks.js").Task} Task
 * @typedef {import("./turn.js").Plan} Plan
 *
 * @typedef {object} Sent a message that left, or waits to leave
 * @property {number} seq
 * @property {string} at
 * @property {string} hash
 * @property {Uint8Array | null} bytes
 * @property {number | null} index its place in the server's journal, once there is a receipt
 * @property {boolean} dropped
 *
 * @typedef {object} View
 * @property {string} id of the device
 * @property {string} task
 * @property {string} title
 * @property {readonly string[]} classes
 * @property {string} features their kind
 * @property {number} dimension
 * @property {"joining" | "checking" | "sensing" | "sending" | "resting" | "paused" | "task-paused" | "leaving" | "ended"} phase
 * @property {{ readonly kind: string, readonly why: string, readonly detail: string } | null} ending
 * @property {number} waiting samples that wait
 * @property {number} batch
 * @property {boolean} full whether no more are collected
 * @property {number} checkIns that have a receipt
 * @property {number} samples that the budget counts: of this task, or of all where a ledger was lost
 * @property {number | null} most samples of the budget
 * @property {{ readonly sample: number, readonly device: number, readonly limit: number | null, readonly delta: number }} paid
 * @property {readonly Sent[]} sent newest first
 * @property {boolean} paused by the owner
 * @property {boolean} unanswered whether the server did not answer at last
 * @property {boolean} recovered
 * @property {boolean} renewed
 * @property {number | null} rows of a file that were not read yet
 */

import { toNumber } from "./fractions.js";
import { epsilonOf } from "./losses.js";
import { KEPT_MESSAGES, roomOf } from "./machine.js";
import { devicePrice, samplePrice } from "./prices.js";
import { openReceipt } from "./receipts.js";

/** Epsilon of the most expensive sample and of the device, over all check-ins that the task's budget allows.
 * @param {Task} task @param {Plan} plan */
export function priceOf({ privacy: { budget, delta, uses } }, { batch, table }) {
  const checkIns = budget ? Math.floor(budget.samples / batch) * uses : 1;
  return {
    sample: epsilonOf(samplePrice(table, uses, delta), delta),
    device: epsilonOf(devicePrice(table, checkIns), delta),
  };
}

/** @param {State} state @param {{ now: number, id: string, rows: number | null }} beside @returns {View} */
export function viewOf(state, { now, id, rows }) {
  const { ending, history, membership, messages, plan, task, waiting, whole } = state;
  const budget = task?.privacy.budget ?? null;
  const delta = task?.privacy.delta ?? 0;
  const given = history.of(null);
  return {
    id,
    task: membership.task,
    title: task ? task.title || task.name : "",
    classes: task?.labels.classes ?? [],
    features: task?.features.kind ?? "",
    dimension: task?.features.dimension ?? 0,
    phase: phaseOf(state, now),
    ending,
    waiting: waiting.length,
    batch: plan?.batch ?? 0,
    full: plan !== null && roomOf(state) === 0,
    checkIns: messages.filter(({ receipt }) => receipt).length,
    samples: history.of(whole.recovered ? null : membership.task).samples,
    most: budget?.samples ?? null,
    paid: {
      sample: epsilonOf(given.dearest, delta),
      device: epsilonOf(given.device, delta),
      limit: budget ? toNumber(budget.epsilon) : null,
      delta,
    },
    sent: messages.slice(-KEPT_MESSAGES).toReversed().map(sentOf),
    paused: state.paused,
    unanswered: state.failures > 0,
    recovered: whole.recovered,
    renewed: whole.renewed,
    rows,
  };
}

/** @param {State} state @param {number} now @returns {View["phase"]} */
function phaseOf({ asked, ending, leaving, membership, messages, notBefore, paused, plan, taskPaused }, now) {
  if (leaving) return "leaving";
  if (ending !== null) return "ended";
  if (!membership.enrolled || plan === null) return "joining";
  if (paused) return "paused";
  if (taskPaused) return "task-paused";
  if (asked === "statement") return "checking";
  if (asked === "publication" || asked === "check-in") return "sending";
  const waits = messages.some(({ receipt, dropped, bytes }) => !receipt && !dropped && bytes);
  return waits && notBefore > now ? "resting" : "sensing";
}

/** @param {import("./machine.js").Message} message @returns {Sent} */
function sentOf({ seq, at, hash, bytes, receipt, dropped }) {
  const index = receipt ? Number(openReceipt(receipt).index) : null;
  return { seq, at, hash, bytes, index, dropped };
}
