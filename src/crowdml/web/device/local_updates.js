/**
 * Several steps on the device between two check-ins: what leaves is the update u, the mean gradient along its own path.
 * Hamm, Luken and Xie 2017, Algorithm 1. Mirrors the device of src/crowdml/protocols/local_updates.py.
 *
 * A device without stability pays for all its samples at once: u is one clipped contribution. Where a sample pays by
 * the stability of a convex, smooth loss, samples are brought into their ball first and nothing is clipped.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./mechanisms.js").Mechanism} Mechanism
 * @typedef {import("./models.js").Model} Model
 * @typedef {import("./models.js").Samples} Samples
 * @typedef {import("./tasks.js").Task} Task
 * @typedef {import("./turn.js").Plan} Plan
 * @typedef {import("./turn.js").Publication} Publication
 * @typedef {ReturnType<typeof readSettings>} Settings
 *
 * @typedef {object} Walk what fixes a device's path
 * @property {Settings} settings
 * @property {Model} model
 * @property {number} l2
 * @property {number} clip no sample's gradient is longer
 * @property {boolean} stable whether a sample pays by stability
 * @property {number} bound on |x|
 */

import { asCount, asMap, decode, readFloats } from "./codec.js";
import { compare, fraction, fromNumber, multiply, ONE, toNumber, whole } from "./fractions.js";
import { makeModel } from "./models.js";
import { FINEST_CLIP, noiseNorm, stableRow, sumRow } from "./rows.js";
import { count, nullable, numberBetween, oneOf, optional, positive, refuseTask, table } from "./sections.js";
import { longestGradient } from "./sgd.js";
import { modelTable, penaltyOf } from "./tasks.js";

const RADIUS = 1000; // where samples pay by stability, a device begins no further from zero
const LARGEST_NUMBER = 1e9; // a published weight beyond it counts as zero
const LARGEST_COUNT = 2 ** 31 - 1;
const MOST_CHECK_INS = 2 ** 16; // of a schedule
const LEAST_SHARE = fraction(1n, BigInt(FINEST_CLIP)); // a smaller one rounds to zero on the finest grid
const GOES = "where the model would go from here";

const readRate = table({
  c: positive,
  counter: optional(oneOf("rounds", "check-ins", "trips", "steps", "path"), "rounds"),
  schedule: optional(oneOf("constant", "1/t", "1/sqrt(t)", "adagrad", "rmsprop"), "constant"),
});

const readNoise = table({
  ratio: nullable(numberBetween(fraction(1n, 10n), whole(10))),
  schedule: optional(oneOf("constant", "geometric", "weights"), "constant"),
});

/** The `[protocol]` table; what only the server needs is read and left alone. */
const readSettings = table({
  batch: count(1, 1_000_000),
  buffer: optional(count(0, 10_000_000), 0),
  clip: nullable(positive),
  kind: oneOf("local_updates"),
  local_steps: optional(count(1, 1000), 1),
  minibatch: optional(count(0, 1_000_000), 0),
  momentum: optional(numberBetween(whole(0), ONE), null),
  noise: optional(readNoise, { ratio: null, schedule: "constant" }),
  optimiser: optional(oneOf("average", "momentum", "adam"), "average"),
  rate: readRate,
  server_batch: optional(count(1, 1_000_000), 1),
  server_rate: optional(positive, null),
  stale: optional(oneOf("refuse", "weigh"), "refuse"),
  update_clip: nullable(positive),
});

/** What this task has a device do. @param {Task} task @returns {Plan} */
export function localPlan(task) {
  const settings = checked(task, readSettings(task.protocol, "protocol"));
  const model = makeModel(modelTable(task), task.features.dimension, task.classes);
  const unknown = Object.keys(task.privacy.epsilon).find((name) => name !== "update");
  if (unknown !== undefined) refuseTask(`local_updates lets out no ${unknown}`);
  const bound = toNumber(task.features.norm.bound);
  const clip = longestGradient(model, "l2", bound, settings.clip && toNumber(settings.clip));
  const walk = { settings, model, l2: toNumber(penaltyOf(task)), clip, bound, stable: false };
  const moved = task.privacy.unit === "device" ? null : samplesMove(task, walk);
  const row = rowOf(task, walk, moved);
  return planOf(task, { ...walk, stable: moved !== null }, row);
}

/** @param {Task} task @param {Walk} walk @param {Mechanism} row @returns {Plan} */
function planOf(task, walk, row) {
  const { batch, buffer } = walk.settings;
  const scheduled = row.schedule !== null;
  return {
    kind: task.masking ? "local/masked/1" : scheduled ? "local/scheduled/1" : "local/update/1",
    batch,
    buffer: buffer || 10 * batch,
    table: { update: row },
    published: "local/weights/1",
    read: (body) => readWeights(body, walk.model),
    contribute: (samples, publication, trip) => {
      const counter = firstCount(walk.settings, publication, trip);
      const fields = { count: counter, version: publication.version };
      const rows = { update: samples.map((held) => [localUpdate(walk, publication.weights, held, counter)]) };
      return { rows, fields: scheduled ? { ...fields, trip } : fields };
    },
    shape: () => [row.length],
  };
}

/** @param {Task} task @param {Settings} settings @returns {Settings} */
function checked(task, settings) {
  const { minibatch, batch, rate, noise } = settings;
  if (minibatch && batch % minibatch) refuseTask("protocol.minibatch does not divide protocol.batch");
  if ((noise.ratio !== null) !== (noise.schedule === "geometric")) {
    refuseTask('"geometric" noise has a ratio, no other has');
  }
  if (compare(multiply(penaltyOf(task), rate.c), ONE) > 0) refuseTask("model.l2 times protocol.rate.c is above 1");
  if (task.masking) checkTogether(settings);
  return settings;
}

/** Refuse what does not go with a sum of several devices' updates. @param {Settings} settings */
function checkTogether({ server_batch: size, rate, noise }) {
  const alike = size === 1 && ["rounds", "steps"].includes(rate.counter) && noise.schedule === "constant";
  if (!alike) refuseTask("under masks all devices of a cohort take equal steps under equal noise");
}

// --- what leaves ---

/** @param {Task} task @param {Walk} walk @param {number | null} stability @returns {Mechanism} */
function rowOf(task, walk, stability) {
  const { settings, model } = walk;
  const shares = settings.noise.schedule === "constant" ? null : scheduleOf(task, walk);
  const device = task.privacy.unit === "device";
  const releases = device ? (shares?.length ?? releasesOf(task, settings)) : task.privacy.uses;
  const covers = { start: 0, stop: settings.batch };
  const asked = { name: "update", length: model.size, covers, promise: GOES, releases, shares };
  if (stability === null) return sumRow(task, { ...asked, bound: longestUpdate(task, walk), whole: true });
  const floatError = floatErrorOf(walk);
  return stableRow(task, { ...asked, stability, deviceStability: 2 * model.bound("l2", walk.bound), floatError });
}

/** How long an update may be in the norm of the task's noise. @param {Task} task @param {Walk} walk @returns {number}
 */
function longestUpdate(task, { settings, clip }) {
  const own = settings.update_clip && toNumber(settings.update_clip);
  if (noiseNorm(task) === "l2") return Math.min(clip, own ?? Infinity);
  return own ?? refuseTask('"discrete-laplace" noise needs protocol.update_clip');
}

/** How many check-ins a device may make; null where nothing bounds them. @param {Task} task @param {Settings}
 * settings */
function mostCheckIns({ privacy: { budget, uses } }, { batch }) {
  return budget && uses * Math.max(1, Math.floor(budget.samples / batch));
}

/** @param {Task} task @param {Settings} settings @returns {number} */
function releasesOf(task, settings) {
  return mostCheckIns(task, settings) ?? refuseTask("privacy.budget is missing, which says how often a device gives");
}

/** What share of an update each check-in of a device gives: its noise is the inverse of that. It ends with the device's
 * budget, or where a share is as good as nothing. @param {Task} task @param {Walk} walk @returns {Fraction[]} */
function scheduleOf(task, walk) {
  const most = mostCheckIns(task, walk.settings);
  const { ratio } = walk.settings.noise;
  const at = ratio ? geometricShares(toNumber(ratio), most) : sharesLikeSteps(walk);
  const endless = most === null || most > MOST_CHECK_INS;
  if (endless && compare(at(MOST_CHECK_INS), LEAST_SHARE) >= 0) refuseTask("its noise has no last check-in");
  /** @type {Fraction[]} */
  const shares = [];
  for (let trip = 0; trip < (most ?? MOST_CHECK_INS); trip++) {
    const share = at(trip);
    if (compare(share, LEAST_SHARE) < 0) break;
    shares.push(share);
  }
  return shares;
}

/** @param {number} base @param {number | null} most @returns {(trip: number) => Fraction} */
function geometricShares(base, most) {
  if (base >= 1) return (trip) => shortShare(base ** -trip);
  if (most === null) return refuseTask("noise that shrinks needs privacy.budget.samples");
  if (base ** (most - 1) < toNumber(LEAST_SHARE)) refuseTask("its noise hides all of the first updates");
  return (trip) => shortShare(base ** (most - 1 - trip));
}

/** @param {Walk} walk @returns {(trip: number) => Fraction} */
function sharesLikeSteps(walk) {
  const { counter } = walk.settings.rate;
  if (counter === "rounds" || counter === "check-ins") refuseTask("the price would depend on other devices' steps");
  const none = { version: 0, taken: 0 };
  /** @param {number} trip */
  const reach = (trip) => reachOf(walk, ratesOf(walk.settings, firstCount(walk.settings, none, trip)));
  const first = reach(0);
  return (trip) => shortShare(reach(trip) / first);
}

/** Down to a short fraction: shares are added up exactly. @param {number} share @returns {Fraction} */
function shortShare(share) {
  return fraction(BigInt(Math.floor(Math.min(share, 1) * 2 ** 20)), 1n << 20n);
}

// --- stability ---

/** How far one replaced sample moves the update in the l2 norm; null where nothing bounds that but a clip.
 * @param {Task} task @param {Walk} walk @returns {number | null} */
function samplesMove(task, walk) {
  const { settings, model } = walk;
  const adaptive = isAdaptive(settings);
  if (adaptive && model.convex) refuseTask("steps that follow the data void the price of a sample");
  const priceless = task.features.norm.kind !== "l2" || adaptive || task.privacy.mechanism === "discrete-laplace";
  return priceless ? null : stabilityOf(walk);
}

/** A step on a convex, L-smooth loss brings two paths no further apart if eta <= 2 / (L + lambda); the step that uses
 * the sample parts them by 2 G eta / B. @param {Walk} walk @returns {number | null} */
function stabilityOf(walk) {
  const { settings, model, l2, bound } = walk;
  const { batch, clip, local_steps: steps, rate, update_clip: shorter } = settings;
  const slope = model.bounded ? model.bound("l2", bound) : Infinity;
  if (clip !== null && toNumber(clip) < slope) return null; // a clipped loss is not convex
  const smooth = model.convex ? model.smoothness(bound) : null;
  if (smooth === null || shorter !== null) return null;
  if (steps > 1 && toNumber(rate.c) * (smooth + l2) > 2) return null; // one step has no path to bend
  const rates = ratesOf(settings, 1);
  const parts = batch / sizeOf(settings);
  const firsts = Array.from({ length: Math.min(parts, steps) }, (_, first) => first);
  const most = Math.max(...firsts.map((first) => pairwiseSum(rates.filter((_, at) => at % parts === first))));
  return (2 * slope * most) / (sizeOf(settings) * reachOf(walk, rates));
}

/** How far float64 may carry two updates apart beyond exact arithmetic, in the l2 norm. @param {Walk} walk */
function floatErrorOf({ settings, model, bound }) {
  const smooth = model.smoothness(bound) ?? 0;
  const entries = model.size + sizeOf(settings) + 8;
  const each = 2 ** -50 * entries * Math.sqrt(model.size) * (1 + bound) ** 2 * (1 + RADIUS);
  return fromNumber(2 * (1 + (2 + smooth) * settings.local_steps) * each);
}

// --- the path ---

/** @param {Settings} settings @returns {number} samples of one step */
function sizeOf({ minibatch, batch }) {
  return minibatch || batch;
}

/** @param {Settings} settings */
function isAdaptive({ rate: { schedule } }) {
  return schedule === "adagrad" || schedule === "rmsprop";
}

/** The counter of the rate at a check-in's first step: 1 or more, whatever the server published.
 * @param {Settings} settings @param {{ version: number, taken: number }} publication @param {number} trip */
function firstCount({ rate: { counter }, local_steps: steps }, { version, taken }, trip) {
  const now = { rounds: version, "check-ins": taken, trips: trip, steps: 0, path: trip * steps }[counter];
  return Math.max(0, Math.min(LARGEST_COUNT - 1, now)) + 1;
}

/** The sizes of a check-in's steps, whose counter stands at `first` in the first. @param {Settings} settings
 * @param {number} first @returns {number[]} */
function ratesOf({ rate: { c, counter, schedule }, local_steps: steps }, first) {
  const moves = counter === "steps" || counter === "path";
  const size = toNumber(c);
  return Array.from({ length: steps }, (_, step) => {
    const t = first + (moves ? step : 0);
    return schedule === "1/t" ? size / t : schedule === "1/sqrt(t)" ? size / Math.sqrt(t) : size;
  });
}

/** H: after its steps a device is at `shrinking * start - H u`. @param {Walk} walk @param {readonly number[]} rates */
function reachOf({ l2 }, rates) {
  let left = 1;
  const shares = rates.toReversed().map((rate) => {
    const share = rate * left;
    left *= 1 - l2 * rate;
    return share;
  });
  return pairwiseSum(shares.toReversed());
}

/** The sum in the order in which NumPy adds: the same float on both sides. @param {readonly number[]} values
 * @returns {number} */
function pairwiseSum(values) {
  if (values.length < 8) return values.reduce((sum, value) => sum + value, 0);
  if (values.length > 128) {
    const half = values.length >> 1;
    const middle = half - (half % 8);
    return pairwiseSum(values.slice(0, middle)) + pairwiseSum(values.slice(middle));
  }
  const end = values.length - (values.length % 8);
  const r = values.slice(0, 8);
  for (let at = 8; at < end; at++) r[at % 8] += values[at];
  const sum = r[0] + r[1] + (r[2] + r[3]) + (r[4] + r[5] + (r[6] + r[7]));
  return values.slice(end).reduce((total, value) => total + value, sum);
}

/** u, flat: the sum of rate * gradient along the steps from the published weights, their public part aside, over H.
 * @param {Walk} walk @param {Float32Array} published @param {Samples} samples @param {number} counter
 * @returns {Float64Array} */
export function localUpdate(walk, published, samples, counter) {
  const { settings, l2 } = walk;
  const rates = ratesOf(settings, counter);
  const start = startOf(walk, published);
  const held = walk.stable ? { ...samples, x: samples.x.map((row) => usableRow(row, walk.bound)) } : samples;
  const given = new Float64Array(start.length);
  const squares = new Float64Array(start.length);
  let kept = 1;
  rates.forEach((rate, step) => {
    const at = start.map((weight, place) => kept * weight - given[place]);
    const slope = slopeAt(walk, at, minibatchOf(settings, held, step));
    if (isAdaptive(settings)) adapt(settings, slope, squares);
    const left = 1 - l2 * rate;
    for (let place = 0; place < given.length; place++) given[place] = left * given[place] + rate * slope[place];
    kept *= left;
  });
  const reach = reachOf(walk, rates);
  return given.map((value) => value / reach);
}

/** The weights that a device begins with: what is no number counts as zero. @param {Walk} walk
 * @param {Float32Array} published @returns {Float64Array} */
function startOf({ stable }, published) {
  const start = Float64Array.from(published, (weight) => (Math.abs(weight) <= LARGEST_NUMBER ? weight : 0));
  return stable ? shorten(start, RADIUS) : start;
}

/** @param {import("./models.js").Numbers} row @param {number} bound @returns {Float64Array} */
function usableRow(row, bound) {
  const usable = row.every((value) => Math.abs(value) <= LARGEST_NUMBER);
  return usable ? shorten(Float64Array.from(row), bound) : new Float64Array(row.length);
}

/** No longer than the bound in the l2 norm. @param {Float64Array} row @param {number} bound @returns {Float64Array} */
function shorten(row, bound) {
  const factor = bound / Math.max(Math.sqrt(squaredLength(row)), bound);
  return row.map((value) => value * factor);
}

/** @param {Float64Array} row */
function squaredLength(row) {
  return row.reduce((sum, value) => sum + value * value, 0);
}

/** Minibatches take turns. @param {Settings} settings @param {Samples} samples @param {number} step
 * @returns {Samples} */
function minibatchOf(settings, { x, y }, step) {
  const size = sizeOf(settings);
  const first = (step % (settings.batch / size)) * size;
  return { x: x.slice(first, first + size), y: y.slice(first, first + size) };
}

/** The mean gradient of a minibatch, each clipped where the task says so. @param {Walk} walk @param {Float64Array}
 * weights
 * @param {Samples} samples @returns {Float64Array} */
function slopeAt({ settings, model, clip, stable }, weights, { x, y }) {
  const sum = new Float64Array(weights.length);
  const clips = settings.clip !== null && !stable;
  x.forEach((row, at) => {
    const gradient = model.gradient(weights, row, y[at]);
    const factor = clips ? shrinking(squaredLength(gradient), clip) : 1;
    if (factor > 0) gradient.forEach((value, place) => (sum[place] += value * factor));
  });
  return sum.map((value) => value / sizeOf(settings));
}

/** What brings a gradient of this squared length into the ball; 0 where the length is not finite. @param {number}
 * squares
 * @param {number} clip */
function shrinking(squares, clip) {
  return Number.isFinite(squares) ? clip / Math.max(Math.sqrt(squares), clip) : 0;
}

/** AdaGrad's and RMSprop's steps, within one check-in. @param {Settings} settings @param {Float64Array} slope
 * @param {Float64Array} squares */
function adapt({ rate: { schedule } }, slope, squares) {
  const [old, fresh] = schedule === "adagrad" ? [1, 1] : [0.9, 0.1];
  slope.forEach((value, place) => {
    squares[place] = old * squares[place] + fresh * value * value;
    slope[place] = value / (Math.sqrt(squares[place]) + 1e-8);
  });
}

/** @param {Uint8Array} body @param {Model} model @returns {Publication} */
function readWeights(body, model) {
  const found = asMap(decode(body), ["taken", "version", "weights"], "The publication");
  return {
    taken: asCount(found.taken, "taken", 0, LARGEST_COUNT),
    version: asCount(found.version, "version", 0, LARGEST_COUNT),
    weights: readFloats(found.weights, model.shape, "weights"),
  };
}
