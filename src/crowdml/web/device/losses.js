/**
 * Losses: what the noise of a release proves, and how losses add up, in exact fractions.
 *
 * A filter says whether one more release keeps a run within a budget of (epsilon, delta). Only the choice of its order
 * and the conversion at that order use floats, with a margin for their errors. Mirrors src/crowdml/privacy/losses.py;
 * proofs: docs/proofs/composition.md.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {{ readonly kind: "pure", readonly epsilon: Fraction }} Pure epsilon-DP
 * @typedef {{ readonly kind: "zcdp", readonly rho: Fraction }} Zcdp rho-zCDP
 * @typedef {{ readonly kind: "renyi", readonly orders: readonly number[], readonly values: readonly Fraction[] }} Renyi
 * @typedef {{ readonly kind: "unbounded" }} Unbounded
 * @typedef {Pure | Zcdp | Renyi | Unbounded} Loss
 *
 * @typedef {object} Total the composition of any mix of losses
 * @property {Fraction} pure the sum of epsilon
 * @property {Fraction} squares the sum of epsilon^2 / 2 of the same releases, their zCDP
 * @property {Fraction} zcdp the sum of rho
 * @property {readonly number[]} orders of the Renyi losses; none: there are none
 * @property {readonly Fraction[]} values
 * @property {boolean} unbounded
 *
 * @typedef {{ readonly epsilon: Fraction, readonly delta: number, readonly order: Fraction | null }} Filter
 */

import {
  add,
  compare,
  divide,
  exact,
  fraction,
  fromNumber,
  least,
  multiply,
  parse,
  square,
  subtract,
  toNumber,
  toText,
  whole,
  ZERO,
} from "./fractions.js";
import { isExact } from "./statements.js";

/** Relative to the terms of a float formula of a few operations. */
const SAFETY = 1e-12;
const TWO = whole(2);

/** @param {Fraction} epsilon @returns {Pure} */
export function pure(epsilon) {
  return { kind: "pure", epsilon: notNegative(epsilon) };
}

/** @param {Fraction} rho @returns {Zcdp} */
export function zcdp(rho) {
  return { kind: "zcdp", rho: notNegative(rho) };
}

/** @param {readonly number[]} orders rising, 2 or more @param {readonly Fraction[]} values that never fall
 * @returns {Renyi} */
export function renyi(orders, values) {
  const rises = orders.every((order, at) => order > (at ? orders[at - 1] : 1));
  const fits = values.every((value, at) => at === 0 || compare(value, values[at - 1]) >= 0);
  if (!orders.length || orders.length !== values.length || !rises || !fits) {
    throw new RangeError("A Renyi loss has rising orders from 2 on, each with a value that does not fall.");
  }
  values.forEach(notNegative);
  return { kind: "renyi", orders, values };
}

/** @type {Unbounded} */
export const UNBOUNDED = { kind: "unbounded" };

/** @param {Fraction} value */
function notNegative(value) {
  if (value.top < 0n) throw new RangeError(`A loss is ${toText(value)}, and no release gives privacy back.`);
  return value;
}

/** The loss that a text says: 'pure 1/10', 'zcdp 3/1000', 'renyi 2:1/50,3:3/50' or 'unbounded'. @param {string} text
 * @returns {Loss} */
export function parseLoss(text) {
  if (!isExact(text)) throw new RangeError(`${text.slice(0, 60)} is not a loss, such as 'pure 1/10'.`);
  const [kind, rest] = text.split(" ", 2);
  if (kind === "pure") return pure(parse(rest));
  if (kind === "zcdp") return zcdp(parse(rest));
  if (kind === "unbounded") return UNBOUNDED;
  const pairs = rest.split(",").map((pair) => pair.split(":", 2));
  return renyi(pairs.map(([order]) => Number(order)), pairs.map(([, value]) => parse(value)));
}

/** @param {Loss} loss @returns {string} */
export function lossText(loss) {
  if (loss.kind === "pure") return `pure ${toText(loss.epsilon)}`;
  if (loss.kind === "zcdp") return `zcdp ${toText(loss.rho)}`;
  if (loss.kind === "unbounded") return "unbounded";
  return `renyi ${loss.orders.map((order, at) => `${order}:${toText(loss.values[at])}`).join(",")}`;
}

/** The loss of the same release when k of its samples are replaced at once; a Renyi loss has no such rule.
 * @param {Loss} loss @param {number} k @returns {Loss} */
export function group(loss, k) {
  if (loss.kind === "pure") return pure(multiply(whole(k), loss.epsilon));
  if (loss.kind === "zcdp") return zcdp(multiply(whole(BigInt(k) * BigInt(k)), loss.rho));
  if (loss.kind === "renyi" && k !== 1) {
    throw new RangeError("A Renyi loss of several samples does not follow from one.");
  }
  return loss;
}

// --- totals ---

/** @type {Total} */
export const NOTHING = { pure: ZERO, squares: ZERO, zcdp: ZERO, orders: [], values: [], unbounded: false };

/** @param {Loss} loss @returns {Total} */
export function totalOf(loss) {
  if (loss.kind === "pure") {
    return { ...NOTHING, pure: loss.epsilon, squares: divide(square(loss.epsilon), TWO) };
  }
  if (loss.kind === "zcdp") return { ...NOTHING, zcdp: loss.rho };
  if (loss.kind === "renyi") return { ...NOTHING, orders: loss.orders, values: loss.values };
  return { ...NOTHING, unbounded: true };
}

/** @param {Iterable<Total>} totals @returns {Total} */
export function addTotals(totals) {
  let sum = NOTHING;
  for (const total of totals) sum = plus(sum, total);
  return sum;
}

/** @param {Total} one @param {Total} other @returns {Total} */
export function plus(one, other) {
  return {
    pure: add(one.pure, other.pure),
    squares: add(one.squares, other.squares),
    zcdp: add(one.zcdp, other.zcdp),
    ...plusRenyi(one, other),
    unbounded: one.unbounded || other.unbounded,
  };
}

/** The sum of two step functions, on all orders of both up to the last that both reach. @param {Total} one
 * @param {Total} other */
function plusRenyi(one, other) {
  if (!one.orders.length || !other.orders.length) {
    return { orders: [...one.orders, ...other.orders], values: [...one.values, ...other.values] };
  }
  const last = Math.min(one.orders[one.orders.length - 1], other.orders[other.orders.length - 1]);
  const orders = [...new Set([...one.orders, ...other.orders])].filter((order) => order <= last).toSorted(rising);
  const values = orders.map((order) => add(valueAt(one, whole(order)) ?? ZERO, valueAt(other, whole(order)) ?? ZERO));
  return { orders, values };
}

/** @param {number} a @param {number} b */
function rising(a, b) {
  return a - b;
}

/** The total of n such totals, one after the other. @param {Total} total @param {number} n @returns {Total} */
export function times(total, n) {
  if (n === 0) return NOTHING;
  const [count, values] = [whole(n), total.values.map((value) => multiply(whole(n), value))];
  const { pure: epsilon, squares, zcdp: rho } = total;
  return {
    ...total,
    pure: multiply(count, epsilon),
    squares: multiply(count, squares),
    zcdp: multiply(count, rho),
    values,
  };
}

/** The Renyi value at the next listed order, which bounds the one asked for; null beyond the last.
 * @param {Total} total @param {Fraction} order @returns {Fraction | null} */
export function valueAt({ orders, values }, order) {
  if (!orders.length) return ZERO;
  const at = orders.findIndex((listed) => compare(whole(listed), order) >= 0);
  return at < 0 ? null : values[at];
}

/** Whether it is epsilon-DP with delta 0. A divergence of zero at one order says that neighbours look the same.
 * @param {Total} total */
export function isPure(total) {
  return !total.unbounded && total.zcdp.top === 0n && (!total.values.length || total.values[0].top === 0n);
}

/** A bound on the Renyi divergence of this order, exact; null if there is none. @param {Total} total
 * @param {Fraction} order @returns {Fraction | null} */
export function divergence(total, order) {
  const value = valueAt(total, order);
  if (total.unbounded || value === null) return null;
  return add(least(total.pure, multiply(order, total.squares)), add(multiply(order, total.zcdp), value));
}

/** A total as sorted texts, one for each kind of loss that it has. @param {Total} total @returns {string[]} */
export function lossesOf(total) {
  return [
    ...(total.pure.top ? [lossText(pure(total.pure))] : []),
    ...(total.orders.length ? [lossText(renyi(total.orders, total.values))] : []), // nothing is known beyond the last
    ...(total.unbounded ? ["unbounded"] : []),
    ...(total.zcdp.top ? [lossText(zcdp(total.zcdp))] : []),
  ];
}

// --- conversion to (epsilon, delta), in floats with a margin ---

/** c(a) = ln(1 / (a delta)) / (a - 1) + ln(1 - 1 / a), and a bound on its float error.
 * @param {number} order @param {number} delta @returns {{ value: number, error: number }} */
export function conversion(order, delta) {
  const one = -(Math.log(order) + Math.log(delta)) / (order - 1);
  const two = Math.log1p(-1 / order);
  const error = SAFETY * (Math.abs(Math.log(delta)) / (order - 1) + Math.abs(one) + Math.abs(two));
  return { value: one + two, error };
}

/** The order a > 1 at which f is least: a coarse search over ln(a - 1), then a golden section. Any order gives a valid
 * bound, so that a poor answer costs tightness alone. @param {(order: number) => number} f @returns {number} */
export function bestOrder(f) {
  const ratio = (Math.sqrt(5) - 1) / 2;
  /** @param {number} u */
  const at = (u) => f(1 + Math.exp(u));
  const found = Array.from({ length: 92 }, (_, i) => at(-9 + 0.5 * i));
  const middle = -9 + 0.5 * found.indexOf(Math.min(...found));
  let [low, high] = [middle - 0.5, middle + 0.5];
  let [left, right] = [high - ratio * (high - low), low + ratio * (high - low)];
  let [atLeft, atRight] = [at(left), at(right)];
  for (let turn = 0; turn < 60; turn++) {
    if (atLeft <= atRight) {
      [high, right, atRight] = [right, left, atLeft];
      left = high - ratio * (high - low);
      atLeft = at(left);
    } else {
      [low, left, atLeft] = [left, right, atRight];
      right = low + ratio * (high - low);
      atRight = at(right);
    }
  }
  return 1 + Math.exp((low + high) / 2);
}

/** The float at or just above a fraction, where a float stands for the decimal that it prints as.
 * @param {Fraction} value @returns {number} */
export function floatAbove(value) {
  const nearest = toNumber(value);
  return nearest === Infinity || compare(exact(nearest), value) >= 0 ? nearest : nextUp(nearest);
}

/** @param {number} number @returns {number} the next float above a number that is not negative */
function nextUp(number) {
  const bits = new BigInt64Array(Float64Array.of(number).buffer);
  bits[0] += 1n;
  return new Float64Array(bits.buffer)[0];
}

/** The least epsilon at this delta that the losses prove, rounded up; infinite if they prove none.
 * @param {Total} total @param {number} delta @returns {number} */
export function epsilonOf(total, delta) {
  checkDelta(delta);
  if (total.unbounded) return Infinity;
  if (delta === 0) return isPure(total) ? floatAbove(total.pure) : Infinity;
  return Math.min(...waysOf(total, delta).map(({ epsilon }) => epsilon));
}

/** Two ways to an epsilon, with their orders: all of it as Renyi divergence; the pure part as it is, and the rest so.
 * @param {Total} total @param {number} delta */
function waysOf(total, delta) {
  const all = converted(add(total.squares, total.zcdp), total, delta);
  if (isPure(total)) return [all, { epsilon: floatAbove(total.pure), order: all.order }];
  const rest = converted(total.zcdp, total, delta);
  const sum = total.pure.top ? nextUp(floatAbove(total.pure) + rest.epsilon) : rest.epsilon;
  return [all, { epsilon: sum, order: rest.order }];
}

/** The least epsilon of rho-zCDP and Renyi losses together, rounded up, and its order. The least is at a listed order,
 * or where the rest of the formula has its own. @param {Fraction} rho @param {Total} total @param {number} delta */
function converted(rho, total, delta) {
  const own = bestOrder((order) => order * floatAbove(rho) + conversion(order, delta).value);
  const found = [...total.orders, own].map((order) => ({ epsilon: epsilonAt(rho, total, delta, order), order }));
  return found.reduce((best, each) => (cheaper(each, best) ? each : best));
}

/** @param {{ epsilon: number, order: number }} one @param {{ epsilon: number, order: number }} other */
function cheaper(one, other) {
  return one.epsilon < other.epsilon || (one.epsilon === other.epsilon && one.order < other.order);
}

/** @param {Fraction} rho @param {Total} total @param {number} delta @param {number} order @returns {number} */
function epsilonAt(rho, total, delta, order) {
  const value = valueAt(total, fromNumber(order));
  if (value === null) return Infinity;
  const { value: cost, error } = conversion(order, delta);
  const spent = floatAbove(add(multiply(fromNumber(order), rho), value));
  return Math.max(0, spent * (1 + SAFETY) + cost + error);
}

/** @param {number} delta */
function checkDelta(delta) {
  if (!(delta >= 0 && delta < 1)) {
    throw new RangeError(`delta is ${delta}: use 0 for pure losses, or a number such as 1e-6.`);
  }
}

// --- filters ---

/** The filter of a budget: its order is the best for zCDP losses, or for `plan` where that is public and fixed before
 * the run. @param {Fraction} epsilon @param {number} delta @param {Total} [plan] @returns {Filter} */
export function filterOf(epsilon, delta, plan) {
  checkDelta(delta);
  notNegative(epsilon);
  if (delta === 0) return { epsilon, delta, order: null };
  const planned = plan && lossesOf(plan).length
    ? waysOf(plan, delta).reduce((best, each) => (cheaper(each, best) ? each : best))
    : null;
  return { epsilon, delta, order: fromNumber(planned?.order ?? zcdpOrder(epsilon, delta)) };
}

/** The order at which a budget holds the largest rho. @param {Fraction} epsilon @param {number} delta */
function zcdpOrder(epsilon, delta) {
  const budget = toNumber(epsilon);
  return bestOrder((order) => (conversion(order, delta).value - budget) / order);
}

/** What the divergences at the filter's order may sum to, rounded down; null without an order. @param {Filter} filter
 * @returns {Fraction | null} */
export function limitOf({ epsilon, delta, order }) {
  if (order === null) return null;
  const { value, error } = conversion(toNumber(order), delta);
  return subtract(subtract(epsilon, fromNumber(value)), fromNumber(error));
}

/** Whether releases of this total keep the run within the budget: all pure and at most epsilon, or within the limit at
 * the one order. @param {Filter} filter @param {Total} total @returns {boolean} */
export function allows(filter, total) {
  if (isPure(total) && compare(total.pure, filter.epsilon) <= 0) return true;
  const limit = limitOf(filter);
  if (filter.order === null || limit === null) return false;
  const spent = divergence(total, filter.order);
  return spent !== null && compare(spent, limit) <= 0;
}

/** The error of a filter's limit by which two machines' floats may differ, with room: a hundredth of the margin.
 * @param {Filter} filter @returns {Fraction} */
export function doubtOf({ delta, order }) {
  if (order === null) return ZERO;
  return divide(fromNumber(conversion(toNumber(order), delta).error), fraction(100n));
}
