/**
 * Which devices of a cohort share masks: everyone with everyone, or, in a large cohort, each with k neighbours on a
 * circle; and the thresholds that keep this safe. All of it exact: devices and server compute the same plan.
 * Mirrors src/crowdml/secagg/graph.py; docs/secagg.md has the conditions.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {object} GraphPlan
 * @property {number} neighbours of each device
 * @property {number} threshold shares that rebuild a secret
 * @property {number} quorum others that must have signed the same survivors
 * @property {number} survivors the least
 * @property {boolean} complete whether everyone is a neighbour
 */

import { concat, sha256, toHex, toUtf8 } from "./bytes.js";

/** Cohorts up to this size have the complete graph. */
const COMPLETE = 200;
const GRINDING = 40; // bits: how often a server may shuffle whom it invites
const SECURITY = 40; // bits
const CORRECTNESS = 30; // bits

/** The plan of a cohort; null if no threshold is both safe and within reach of the survivors. @param {number} devices
 * @param {number} colluders @param {number} survivors @returns {GraphPlan | null} */
export function planGraph(devices, colluders, survivors) {
  const quorum = Math.floor((devices + colluders) / 2) + 1;
  if (quorum > survivors - 1 || colluders < 0 || colluders >= survivors || survivors > devices) return null;
  const pairs = devices > COMPLETE ? leastPairs(devices, colluders, survivors) : 0;
  const threshold = pairs ? thresholdOf(devices, colluders, survivors, 2 * pairs) : 0;
  const sparse = threshold > 0 && 2 * pairs < devices - 1;
  if (sparse) return { neighbours: 2 * pairs, threshold, quorum, survivors, complete: false };
  return { neighbours: devices - 1, threshold: quorum, quorum, survivors, complete: true };
}

/** The fewest pairs of neighbours for which there is a threshold. @param {number} devices @param {number} colluders
 * @param {number} survivors @returns {number} */
function leastPairs(devices, colluders, survivors) {
  let [low, high] = [0, Math.floor((devices - 1) / 2)];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (thresholdOf(devices, colluders, survivors, 2 * middle)) high = middle;
    else low = middle;
  }
  return high;
}

/** The least safe threshold for k neighbours; 0 if the survivors would not reach it. @param {number} n
 * @param {number} colluders @param {number} survivors @param {number} k @returns {number} */
function thresholdOf(n, colluders, survivors, k) {
  const rare = BigInt(n) << BigInt(SECURITY + GRINDING + 1); // one in so many: two events, each for every device
  const everywhere = mostMarked(n - 1, colluders, k, rare);
  const oneSide = mostMarked(n - 1, colluders, k / 2, 2n * rare);
  const threshold = Math.max(Math.floor((k + 1 + everywhere) / 2) + 1, k / 2 + oneSide + 1);
  if (threshold > k) return 0;
  const missing = waysOf(n - 1, n - survivors, k).slice(Math.max(k - threshold + 1, 0));
  const fails = missing.reduce((sum, ways) => sum + ways, 0n) * (BigInt(n) << BigInt(CORRECTNESS));
  return fails > choose(n - 1, k) ? 0 : threshold;
}

/** The least number of marked among the drawn that is exceeded at most once in `rare`. @param {number} total
 * @param {number} marked @param {number} drawn @param {bigint} rare @returns {number} */
function mostMarked(total, marked, drawn, rare) {
  const [ways, all] = [waysOf(total, marked, drawn), choose(total, drawn)];
  let beyond = 0n;
  for (let hits = ways.length - 1; hits >= 0; hits--) {
    beyond += ways[hits];
    if (beyond * rare > all) return hits;
  }
  return 0;
}

/** In how many ways 0, 1, ... of the drawn are marked. @param {number} total @param {number} marked @param {number}
 * drawn
 * @returns {bigint[]} */
function waysOf(total, marked, drawn) {
  const least = Math.max(0, drawn - (total - marked));
  let ways = choose(marked, least) * choose(total - marked, drawn - least);
  /** @type {bigint[]} */
  const found = Array(least).fill(0n);
  for (let hits = least; hits <= Math.min(marked, drawn); hits++) {
    found.push(ways);
    const above = BigInt(marked - hits) * BigInt(drawn - hits);
    ways = (ways * above) / (BigInt(hits + 1) * BigInt(total - marked - drawn + hits + 1));
  }
  return found;
}

/** @param {number} n @param {number} k @returns {bigint} */
function choose(n, k) {
  let found = 1n;
  for (let at = 1; at <= Math.min(k, n - k); at++) found = (found * BigInt(n - at + 1)) / BigInt(at);
  return k > n ? 0n : found;
}

/** The neighbours of the device at `own`, by index in rising order. `seed` is the hash of all that was advertised.
 * @param {readonly string[]} ids sorted @param {Bytes} seed @param {number} own @param {GraphPlan} plan
 * @returns {Promise<number[]>} */
export async function neighboursOf(ids, seed, own, plan) {
  if (plan.complete) return ids.map((_, at) => at).filter((at) => at !== own);
  const prefix = concat(toUtf8("crowdml/secagg/circle/1"), seed);
  const drawn = await Promise.all(ids.map(async (id) => toHex(await sha256(concat(prefix, toUtf8(id))))));
  const order = ids.map((_, at) => at).toSorted((one, other) => (drawn[one] < drawn[other] ? -1 : 1));
  const place = order.indexOf(own);
  const steps = Array.from({ length: plan.neighbours / 2 }, (_, at) => at + 1).flatMap((step) => [step, -step]);
  const found = steps.map((step) => order[(place + step + ids.length) % ids.length]);
  return found.toSorted((one, other) => one - other);
}
