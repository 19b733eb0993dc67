/**
 * What a device has spent, and whether it may spend more: the algebra of its ledger, without a database.
 *
 * A sample pays the sum of the charges that cover it, a device the sum of all. Nothing is ever refunded, and nothing is
 * drawn before a step is allowed. Mirrors src/crowdml/privacy/spending.py and spans.py.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./losses.js").Loss} Loss
 * @typedef {import("./losses.js").Total} Total
 * @typedef {import("./losses.js").Filter} Filter
 * @typedef {import("./statements.js").Statement} Statement
 *
 * @typedef {object} Charge one release's loss on one span of samples
 * @property {string} task its hash in hex
 * @property {string} row of the protocol's table
 * @property {Loss} loss of one sample of the span
 * @property {Loss} deviceLoss if all samples of the span are replaced
 * @property {number} first serials, both included
 * @property {number} last
 * @property {Loss} [alone] of one sample, if everyone else of the cohort colludes
 * @property {Loss} [deviceAlone]
 *
 * @typedef {object} Budget
 * @property {Fraction} epsilon of any one sample
 * @property {number} delta
 * @property {number} samples that the device ever gives
 * @property {Fraction | null} deviceEpsilon of the device, where it is capped
 * @property {string | null} task whose charges count; null: those of all tasks
 * @property {Total} [plan] what one sample pays in all, where that is public and fixed before the first release
 *
 * @typedef {"budget" | "samples" | "sample" | "device"} Cap
 * @typedef {{ readonly cap: Cap, readonly budget: Budget | null }} Refusal
 * @typedef {readonly [first: number, last: number]} Span
 * @typedef {{ given: Span[], samples: number, device: Total, dearest: Total }} Spent
 */

import { most, whole, ZERO } from "./fractions.js";
import { addTotals, allows, filterOf, lossesOf, NOTHING, plus, totalOf, valueAt } from "./losses.js";

/** Everything that a device has spent, over all tasks and in each. */
export class History {
  /** @param {Iterable<Charge>} [charges] in the order in which they were made */
  constructor(charges = []) {
    /** @type {Charge[]} */
    this.charges = [];
    /** @type {Map<string | null, Spent>} */
    this.spent = new Map();
    this.add([...charges]);
  }

  /** Why the budgets do not all allow these charges as one step; null if they do. A budget of another task says
   * nothing. Without any budget nothing is allowed. @param {string} task @param {readonly Charge[]} charges
   * @param {readonly Budget[]} budgets @returns {Refusal | null} */
  refusal(task, charges, budgets) {
    if (charges.some((charge) => charge.task !== task)) throw new Error("A step holds a charge of another task.");
    const held = budgets.filter((budget) => budget.task === null || budget.task === task);
    if (!held.length) return { cap: "budget", budget: null };
    for (const budget of held) {
      const cap = this.capOf(budget, charges);
      if (cap) return { cap, budget };
    }
    return null;
  }

  /** The cap of a budget that a step breaks. @param {Budget} budget @param {readonly Charge[]} charges
   * @returns {Cap | null} */
  capOf(budget, charges) {
    const before = this.of(budget.task);
    const union = charges.reduce(covering, before.given);
    if (sizeOf(union) > budget.samples) return "samples";
    const filter = filterOf(budget.epsilon, budget.delta, budget.plan);
    if (!this.paid(budget.task, charges).every((total) => allows(filter, total))) return "sample";
    if (budget.deviceEpsilon === null) return null;
    const all = plus(before.device, deviceTotal(charges));
    return allows(filterOf(budget.deviceEpsilon, budget.delta), all) ? null : "device";
  }

  /** Add the charges of a step that was allowed. @param {readonly Charge[]} charges */
  add(charges) {
    for (const task of new Set([null, ...charges.map((charge) => charge.task)])) {
      const own = charges.filter((charge) => task === null || charge.task === task);
      this.spent.set(task, this.after(task, own));
    }
    this.charges.push(...charges);
  }

  /** What a task, or all of them, would have spent after these charges. @param {string | null} task
   * @param {readonly Charge[]} charges @returns {Spent} */
  after(task, charges) {
    const before = this.of(task);
    const given = charges.reduce(covering, before.given);
    return {
      given,
      samples: sizeOf(given),
      device: plus(before.device, deviceTotal(charges)),
      dearest: [before.dearest, ...this.paid(task, charges)].reduce(ceilingOf),
    };
  }

  /** The running totals that an envelope carries, these charges included. @param {readonly Charge[]} [charges]
   * @returns {Statement} */
  statement(charges = []) {
    const { dearest, device, samples } = this.after(null, charges);
    return { dearest: lossesOf(dearest), device: lossesOf(device), samples };
  }

  /** @param {string | null} task @returns {Spent} */
  of(task) {
    return this.spent.get(task) ?? { given: [], samples: 0, device: NOTHING, dearest: NOTHING };
  }

  /** What the samples under these charges have paid, those before included: one total for each stretch of samples that
   * were charged alike. @param {string | null} task @param {readonly Charge[]} charges @returns {Total[]} */
  paid(task, charges) {
    const spans = charges.reduce(covering, /** @type {Span[]} */ ([]));
    const met = this.charges.filter((charge) => (task === null || charge.task === task) && spans.some(meets(charge)));
    return stretches([...met, ...charges], spans);
  }
}

/** @param {readonly Charge[]} charges @returns {Total} */
function deviceTotal(charges) {
  return addTotals(charges.map((charge) => totalOf(charge.deviceLoss)));
}

/** @param {Charge} charge @returns {(span: Span) => boolean} */
function meets({ first, last }) {
  return ([begin, end]) => first <= end && last >= begin;
}

/** The total of each stretch of serials in the spans that these charges cover alike. @param {readonly Charge[]} charges
 * @param {readonly Span[]} spans @returns {Total[]} */
function stretches(charges, spans) {
  const points = [...new Set(charges.flatMap(({ first, last }) => [first, last + 1]))].toSorted((a, b) => a - b);
  const waiting = charges.toSorted((one, other) => other.first - one.first);
  /** @type {Charge[]} */
  let over = [];
  const begins = points.filter((point) => spans.some(([first, last]) => first <= point && point <= last));
  return begins.map((point) => {
    while (waiting.length && waiting[waiting.length - 1].first <= point) over.push(...waiting.splice(-1));
    over = over.filter(({ last }) => last >= point);
    return addTotals(over.map((charge) => totalOf(charge.loss)));
  });
}

/** Disjoint spans in order, with the span of one more charge. @param {Span[]} spans
 * @param {{ first: number, last: number }} charge @returns {Span[]} */
function covering(spans, { first, last }) {
  const apart = spans.filter(([begin, end]) => end < first - 1 || begin > last + 1);
  const met = spans.filter(([begin, end]) => end >= first - 1 && begin <= last + 1);
  const begin = Math.min(first, ...met.map((span) => span[0]));
  const end = Math.max(last, ...met.map((span) => span[1]));
  return [...apart, /** @type {Span} */ ([begin, end])].toSorted((one, other) => one[0] - other[0]);
}

/** @param {readonly Span[]} spans @returns {number} how many serials they cover */
function sizeOf(spans) {
  return spans.reduce((size, [first, last]) => size + last - first + 1, 0);
}

/** The least total that is at least each of two in every part: it costs no less than either, at any delta.
 * @param {Total} one @param {Total} other @returns {Total} */
function ceilingOf(one, other) {
  const both = [...new Set([...one.orders, ...other.orders])].toSorted((a, b) => a - b);
  const orders = both.filter((order) => valueAt(one, whole(order)) && valueAt(other, whole(order)));
  /** @param {number} order */
  const value = (order) => most(valueAt(one, whole(order)) ?? ZERO, valueAt(other, whole(order)) ?? ZERO);
  return {
    pure: most(one.pure, other.pure),
    squares: most(one.squares, other.squares),
    zcdp: most(one.zcdp, other.zcdp),
    orders,
    values: orders.map(value),
    unbounded: one.unbounded || other.unbounded,
  };
}
