/** The door: what it lets out, what it notes, and what it refuses. */

import { Door, Masked, Release, sensed, split } from "../../../src/crowdml/web/device/door.js";
import { ONE, parse } from "../../../src/crowdml/web/device/fractions.js";
import { pure } from "../../../src/crowdml/web/device/losses.js";
import { check, equal, holds, refused } from "./expect.js";
import { silence } from "./silence.js";

/** @type {import("../../../src/crowdml/web/device/mechanisms.js").Mechanism} */
const COUNTS = {
  form: "count",
  norm: "l1",
  bound: 1,
  step: ONE,
  length: 3,
  covers: { start: 0, stop: 2 },
  whole: false,
  observer: "anyone",
  adjacency: "replace-sample",
  law: { kind: "laplace", scale: parse("40") },
  losses: { loss: pure(parse("1/20")), deviceLoss: pure(parse("1/10")) },
  promise: "counts",
  schedule: null,
};
const TABLE = { labels: COUNTS, summed: { ...COUNTS, observer: /** @type {const} */ ("aggregate") } };
const BATCH = { x: [Float64Array.of(1), Float64Array.of(2), Float64Array.of(3)], y: [0, 2, 1] };

/** @param {import("../../../src/crowdml/web/device/models.js").Samples} samples */
function cells({ y }) {
  return [...y];
}

export function checks() {
  return [
    check("what leaves is noted, with its part and its price", () => {
      const door = new Door(TABLE, silence, 0);
      const [first] = split(sensed(BATCH), 2);
      equal(door.release("labels", first.map(cells)).value, [1, 0, 1], "the counts");
      equal(door.passages, [{ row: "labels", part: { start: 0, stop: 2 }, losses: COUNTS.losses }], "what is charged");
    }),
    check("a value leaves with noise, in another place each time", () => {
      const noise = { ...silence, discreteLaplace: () => Int32Array.of(5, -7, 2 ** 31 - 1) };
      const [first] = split(sensed(BATCH), 2);
      equal(
        new Door(TABLE, noise, 0).release("labels", first.map(cells)).value,
        [6, -7, -(2 ** 31)],
        "noise, and int32",
      );
    }),
    check("no Private is read, written or made a Release without the door", async () => {
      const value = sensed(BATCH);
      equal(Object.keys(value), [], "its fields");
      await refused(() => JSON.stringify(value));
      await refused(() => value.open(Symbol("door")));
      await refused(() => new Release(Symbol("door"), Int32Array.of(1)));
      await refused(() => new Masked(Symbol("door"), Int32Array.of(1)));
    }),
    check("a release is not changed afterwards, and a masked value leaves under masks alone", async () => {
      const [first] = split(sensed(BATCH), 2);
      const release = new Door(TABLE, silence, 0).release("labels", first.map(cells));
      release.value[0] = 99;
      equal(release.value, [1, 0, 1], "what was let out");
      const masked = new Door(TABLE, silence, 0).masked("summed", first.map(cells));
      await refused(() => JSON.stringify(masked));
      equal(masked.under((summand) => summand[0] + 7), 8, "under a mask");
    }),
    check("the door refuses what is not priced", async () => {
      const door = new Door(TABLE, silence, 0);
      const [first, rest] = split(sensed(BATCH), 2);
      const value = first.map(cells);
      const forged = /** @type {typeof value} */ (/** @type {unknown} */ ({ part: first.part, open: () => [0, 0] }));
      const wrong = [
        () => door.release("nothing", value),
        () => door.release("toString", value),
        () => door.release("summed", value),
        () => door.masked("labels", value),
        () => door.release("labels", rest.map(cells)),
        () => door.release("labels", sensed(BATCH).map(cells)),
        () => door.release("labels", first.map(() => [0])),
        () => door.release("labels", forged),
      ];
      for (const run of wrong) await refused(run);
      equal(door.passages, [], "what is charged");
      door.release("labels", value);
      holds((await refused(() => door.release("labels", value))).message.includes("already"), "twice");
      await refused(() => split(sensed(BATCH), 4));
    }),
  ];
}
